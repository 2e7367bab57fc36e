"""The scripts behind the documentation's figures still run on the engine as it is."""

import pytest

from scripts import engine_overhead, plot_timeline


@pytest.mark.parametrize("policy", ["neo", "auto"])
def test_a_simulated_run_has_a_row_for_each_iteration(policy: str) -> None:
    rows = plot_timeline.simulate_run(policy)
    starts = [row[0] for row in rows]
    assert starts == sorted(starts)
    assert rows[0][4] > rows[-1][4] == 0  # prompts that wait


@pytest.mark.parametrize("stop", [[], ["never"]])
def test_the_engines_own_time_is_told_part_by_part(
    stop: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    engine_overhead.measure("auto", 4, 40, 0.0, stop)
    parts, beside = capsys.readouterr().out.split("|")
    assert len(parts.split()) == 4 + len(engine_overhead.PARTS) + 1
    assert all(float(part) > 0 for part in beside.split())
