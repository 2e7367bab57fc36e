"""The speed of CPU, GPU and bus is measured before loading; offload times match those of iterations."""

from unittest.mock import Mock

import pytest
import torch
from fallback_levels import Levels

from neo_desktop.engine.cuda.errors import StreamMemoryError
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.profiling import rates

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def with_flags(*_: object, in_graph: bool) -> float:
    """Return the seconds of a round trip: 7 µs with flags, and 300 µs with threads."""
    return 7e-6 if in_graph else 300e-6


def without_flags(*_: object, in_graph: bool) -> float:
    if in_graph:
        raise StreamMemoryError("the driver refuses")
    return 300e-6


@pytest.fixture
def _offloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "round_trip_s", with_flags)
    monkeypatch.setattr(rates, "open_backend", lambda streams: Mock())


@pytest.mark.usefixtures("_offloads")
def test_hand_offs_are_told_by_flags_where_there_are_any(
    levels: Levels, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels()
    assert rates._offload_ms(CPU) == pytest.approx(0.3)
    assert rates._offload_ms(CUDA) == pytest.approx(0.007)
    monkeypatch.setattr(rates, "round_trip_s", without_flags)
    assert rates._offload_ms(CUDA) == pytest.approx(0.3)
    assert fallbacks.limits() == {"graphs": "device-only"}


@pytest.mark.usefixtures("_offloads")
def test_on_a_rung_without_flags_none_are_tried(levels: Levels) -> None:
    levels(graphs="eager")
    assert rates._offload_ms(CUDA) == pytest.approx(0.3)
    assert fallbacks.level("graphs") == "eager"
