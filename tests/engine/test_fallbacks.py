"""Mechanisms take forced levels, respect limits, and fall back one level at a time."""

from pathlib import Path

import pytest

from neo_desktop.engine.fallbacks import MECHANISMS, Fallbacks, variable


def test_the_environment_forces_rungs() -> None:
    fallbacks = Fallbacks({"NEO_DESKTOP_LEVEL_PAGED_DECODE": "torch", "HOME": "/", variable("nvml"): ""})
    assert fallbacks.level("paged_decode") == "torch"
    assert fallbacks.level("rope_append") == "triton"
    assert fallbacks.limits() == {"paged_decode": "torch"}


@pytest.mark.parametrize("forced", [{"paged_decode": "cuda"}, {"magic": "on"}])
def test_what_does_not_exist_is_refused_with_what_does(forced: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"triton, torch|graphs, paged_decode"):
        Fallbacks({variable(name): level for name, level in forced.items()})


def test_limits_only_lower_and_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks = Fallbacks()
    assert fallbacks.limit("graphs", "eager", "the driver refused")
    assert not fallbacks.limit("graphs", "device-only", "something else")
    assert not fallbacks.limit("graphs", "eager", "again")
    assert fallbacks.level("graphs") == "eager"
    assert [record.getMessage().count("the driver refused") for record in caplog.records] == [1]
    (standing,) = [s for s in fallbacks.states() if s.mechanism.name == "graphs"]
    assert standing.reason == "the driver refused"


def test_rungs_hold_within_a_block_only() -> None:
    fallbacks = Fallbacks()
    fallbacks.limit("graphs", "device-only", "the driver refused")
    with fallbacks.at_levels({"graphs": "host-flags", "norm": "torch"}):
        assert fallbacks.level("graphs") == "host-flags"
        assert fallbacks.level("norm") == "torch"
        fallbacks.limit("nvml", "without", "it is not there")
    assert fallbacks.limits() == {"graphs": "device-only"}
    with (
        pytest.raises(ValueError, match="host-flags, device-only, eager"),
        fallbacks.at_levels({"graphs": "none"}),
    ):
        pass


def test_the_page_about_fallbacks_has_every_mechanism_and_level() -> None:
    page = (Path(__file__).parents[2] / "docs" / "dev" / "fallbacks.md").read_text(encoding="utf-8")
    section = page.split("## Fallbacks")[1].split("## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    listed = {
        name.strip(" `"): [level.strip(" `") for level in levels.split("→")]
        for names, levels in rows
        for name in names.split(",")
    }
    here = {name: [level.name for level in mechanism.levels] for name, mechanism in MECHANISMS.items()}
    listed["isa"] = [isa for isa in listed["isa"] if isa in here["isa"]]  # the ISA levels of this CPU
    assert listed == here


def test_graphs_need_pinned_memory() -> None:
    fallbacks = Fallbacks({variable("graphs"): "device-only"})
    fallbacks.limit("host_memory", "pageable", "the driver refused")
    assert fallbacks.level("graphs") == "eager"
    (standing,) = [s for s in fallbacks.states() if s.mechanism.name == "graphs"]
    assert standing.level.name == "eager"
    assert "pinned" in (standing.reason or "")
    assert not fallbacks.descend("graphs", "it failed")
