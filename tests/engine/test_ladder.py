"""Where mechanisms stand: forced, limited, one rung lower."""

from pathlib import Path

import pytest

from neo_desktop.engine.ladder import MECHANISMS, Ladder, variable


def test_everything_stands_highest_at_first() -> None:
    ladder = Ladder()
    assert all(s.rung is s.mechanism.rungs[0] and s.reason is None for s in ladder.standings())
    assert not ladder.limits()


def test_the_environment_forces_rungs() -> None:
    ladder = Ladder.from_environment(
        {"NEO_DESKTOP_RUNG_PAGED_DECODE": "torch", "HOME": "/", variable("nvml"): ""}
    )
    assert ladder.rung("paged_decode") == "torch"
    assert ladder.rung("rope_append") == "triton"
    assert ladder.limits() == {"paged_decode": "torch"}


@pytest.mark.parametrize("forced", [{"paged_decode": "cuda"}, {"magic": "on"}])
def test_what_does_not_exist_is_refused_with_what_does(forced: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"triton, torch|graphs, paged_decode"):
        Ladder(forced)


def test_limits_only_lower_and_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    ladder = Ladder()
    assert ladder.limit("graphs", "eager", "the driver refused")
    assert not ladder.limit("graphs", "device-only", "something else")
    assert not ladder.limit("graphs", "eager", "again")
    assert ladder.rung("graphs") == "eager"
    assert [record.getMessage().count("the driver refused") for record in caplog.records] == [1]
    (standing,) = [s for s in ladder.standings() if s.mechanism.name == "graphs"]
    assert standing.reason == "the driver refused"


def test_descending_ends_at_the_lowest() -> None:
    ladder = Ladder()
    assert [ladder.descend("prompt_attention", "it failed") for _ in range(3)] == [True, True, False]
    assert ladder.rung("prompt_attention") == "math"


def test_names_are_unique_and_speak() -> None:
    for mechanism in MECHANISMS.values():
        names = [rung.name for rung in mechanism.rungs]
        assert len(set(names)) == len(names) > 1
        assert mechanism.title
        assert all(rung.what for rung in mechanism.rungs)


def test_one_line_tells_of_several_mechanisms(caplog: pytest.LogCaptureFixture) -> None:
    ladder = Ladder({"norm": "torch"})
    for _ in range(2):
        ladder.limit_all(("norm", "activation", "row_copy"), "torch", "there is no compiler")
    assert ladder.limits() == dict.fromkeys(("norm", "activation", "row_copy"), "torch")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "Gated activation; Rows of KV" in line
    assert "there is no compiler" in line


def test_rungs_hold_within_a_block_only() -> None:
    ladder = Ladder()
    ladder.limit("graphs", "device-only", "the driver refused")
    with ladder.standing_on({"graphs": "host-flags", "norm": "torch"}):
        assert ladder.rung("graphs") == "host-flags"
        assert ladder.rung("norm") == "torch"
        ladder.limit("nvml", "without", "it is not there")
    assert ladder.limits() == {"graphs": "device-only"}
    with pytest.raises(ValueError, match="choose one of"), ladder.standing_on({"graphs": "none"}):
        pass


def test_the_page_about_the_architecture_has_every_mechanism_and_rung() -> None:
    page = (Path(__file__).parents[2] / "docs" / "dev" / "ladder.md").read_text(encoding="utf-8")
    section = page.split("## The ladder")[1].split("## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    listed = {name.strip(" `"): [rung.strip(" `") for rung in rungs.split("→")] for name, rungs in rows}
    here = {name: [rung.name for rung in mechanism.rungs] for name, mechanism in MECHANISMS.items()}
    listed["isa"] = [isa for isa in listed["isa"] if isa in here["isa"]]  # those of this CPU
    assert listed == here


def test_graphs_need_pinned_memory() -> None:
    ladder = Ladder({"graphs": "device-only"})
    ladder.limit("host_memory", "pageable", "the driver refused")
    assert ladder.rung("graphs") == "eager"
    (standing,) = [s for s in ladder.standings() if s.mechanism.name == "graphs"]
    assert standing.rung.name == "eager"
    assert "pinned" in (standing.reason or "")
    assert not ladder.descend("graphs", "it failed")
