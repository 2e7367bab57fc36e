"""The scripts behind the documentation's figures still run on the current engine."""

import pytest

from benchmarks import engine_overhead
from research import plot_timeline, weights_simulation


@pytest.mark.parametrize("policy", ["neo", "auto"])
def test_a_simulated_run_has_a_row_for_each_iteration(policy: str) -> None:
    rows = plot_timeline.simulate_run(policy)
    starts = [row[0] for row in rows]
    assert starts == sorted(starts)
    assert rows[0][4] > rows[-1][4] == 0  # waiting prompts


@pytest.mark.parametrize("stop", [[], ["never"]])
def test_the_engines_own_time_is_told_part_by_part(
    stop: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    engine_overhead.measure("auto", 4, 40, 0.0, stop)
    parts, beside = capsys.readouterr().out.split("|")
    assert len(parts.split()) == 4 + len(engine_overhead.PARTS) + 1
    assert all(float(part) > 0 for part in beside.split())


@pytest.mark.parametrize("gpu", weights_simulation.MACHINES)
@pytest.mark.parametrize("share", [0.1, 0.6])
def test_divided_weights_are_the_fastest_and_below_their_bound(gpu: str, share: float) -> None:
    case = weights_simulation.Case.of(gpu, "Llama-2-13B", share)
    *others, divided = (case.level(name) for name in weights_simulation.LEVELS)
    assert max(others) < divided <= case.bound()
    ablated = weights_simulation.ablated(case)
    assert ablated["all"] == pytest.approx(divided)
    assert max(ablated.values()) <= 1.001 * divided


def test_every_card_runs_something_larger_than_its_memory() -> None:
    for card in weights_simulation.CARDS:
        assert "GB)" in weights_simulation.on_card(card, *weights_simulation.quantised("llama-3.1-70b"))


def test_streaming_experts_makes_prompts_faster() -> None:
    case = weights_simulation.Case.of("rtx-3060", "Qwen3-30B-A3B, 4 bits", 0.5)
    by_cpu = case.times(weights_simulation.PROMPT, case.plan, case.rates, 0.0)
    assert case.times(weights_simulation.PROMPT, case.plan, case.rates) < 0.6 * by_cpu
