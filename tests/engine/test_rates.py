"""The speed of CPU, GPU and bus is measured before loading; offload times match those of iterations."""

from typing import Any

import pytest
import torch
from fallback_levels import Levels
from torch.utils._python_dispatch import TorchDispatchMode

from neo_desktop.engine.cuda.errors import StreamMemoryError
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.profiling import rates
from neo_desktop.engine.profiling.rates import measured_rates

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


def test_rates_of_a_cpu_that_imitates_a_gpu() -> None:
    found = measured_rates(CPU, torch.float32)
    assert min(found.cpu_bytes_per_s, found.cpu_flops, found.bus_bytes_per_s, found.host_bytes_per_s) > 1e6
    assert 0 < found.offload_ms < 1e3


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


def test_what_is_read_is_more_than_caches_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A B200 has 126 MB of L2 cache, a desktop CPU up to 128 MB of L3."""
    read: list[int] = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default:
                read.append(args[0].nbytes + args[1].nbytes)
            return func(*args, **(kwargs or {}))

    with Recorded():
        assert rates.measured_bus_share.__wrapped__(CPU) > 0
    assert max(read) >= 2 * 256 << 20
    _, _, nbytes = rates._products(CPU, torch.bfloat16)
    assert nbytes >= 256 << 20
