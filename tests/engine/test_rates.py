"""The speed of CPU, GPU and bus is measured before loading; offload times match those of iterations."""

import pytest
import torch
from fallback_levels import Levels

from neo_desktop.engine.cuda.errors import StreamMemoryError
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.profiling import rates

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class FakeOffload:
    """Offload timer that takes 7 µs with flags, if available, and 300 µs with threads."""

    has_flags = True

    def __init__(self, device: torch.device, backend: object, *, in_graph: bool) -> None:
        self._in_graph = in_graph

    def seconds(self, nbytes: int) -> float:
        if self._in_graph and not self.has_flags:
            raise StreamMemoryError("the driver refuses")
        return 7e-6 if self._in_graph else 300e-6

    def close(self) -> None:
        pass


@pytest.fixture
def _offloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "OffloadTimer", FakeOffload)
    monkeypatch.setattr(rates, "open_backend", lambda streams: None)


@pytest.mark.usefixtures("_offloads")
def test_hand_offs_are_told_by_flags_where_there_are_any(
    levels: Levels, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels()
    assert rates._offload_ms(CPU) == pytest.approx(0.3)
    assert rates._offload_ms(CUDA) == pytest.approx(0.007)
    monkeypatch.setattr(FakeOffload, "has_flags", False)
    assert rates._offload_ms(CUDA) == pytest.approx(0.3)
    assert fallbacks.limits() == {"graphs": "device-only"}


@pytest.mark.usefixtures("_offloads")
def test_on_a_rung_without_flags_none_are_tried(levels: Levels) -> None:
    levels(graphs="eager")
    assert rates._offload_ms(CUDA) == pytest.approx(0.3)
    assert fallbacks.level("graphs") == "eager"
