"""Host memory is pinned for a GPU if the system allows it, and works unpinned otherwise."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fallback_levels import Levels
from torch import Tensor

from neo_desktop.engine.cuda.copies import HostBuffer, host_memory, suits_graphs
from neo_desktop.engine.execute import build
from neo_desktop.engine.fallbacks import fallbacks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
REFUSED = "CUDA error: out of memory"  # torch's message when the system refuses to pin


class Pinning:
    """Tensor factory that grants the first `most` requests for pinned memory."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.pinned = 0

    def __call__(self, pin: bool) -> Tensor:
        if pin:
            if self.pinned == self.most:
                raise torch.AcceleratorError(REFUSED)
            self.pinned += 1
        return torch.zeros(3)


def test_memory_is_pinned_for_a_gpu_only() -> None:
    make = Pinning(10)
    host_memory(make, CPU)
    assert make.pinned == 0
    host_memory(make, CUDA)
    assert make.pinned == 1
    assert not fallbacks.limits()


@pytest.mark.parametrize("most", [0, 2])
def test_where_nothing_more_is_pinned_the_rest_is_pageable(
    most: int, caplog: pytest.LogCaptureFixture
) -> None:
    make = Pinning(most)
    for _ in range(4):
        assert torch.equal(host_memory(make, CUDA), torch.zeros(3))
    assert make.pinned == most
    assert fallbacks.limits() == {"host_memory": "pageable"}
    (line,) = [record.getMessage() for record in caplog.records]
    assert REFUSED in line


def test_pageable_memory_can_be_asked_for(levels: Levels) -> None:
    levels(host_memory="pageable")
    make = Pinning(10)
    host_memory(make, CUDA)
    assert make.pinned == 0


def test_a_lost_gpu_is_no_lack_of_memory() -> None:
    def make(pin: bool) -> Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        host_memory(make, CUDA)
    assert not fallbacks.limits()


def test_a_buffer_grows_on_when_no_more_can_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def refusing(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            raise torch.AcceleratorError(REFUSED)
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", refusing)
    view = HostBuffer(CUDA).view((4, 5), torch.float16)
    assert view.shape == (4, 5)
    assert fallbacks.level("host_memory") == "pageable"


@pytest.mark.parametrize("fits", [True, False])
def test_graphs_need_pinned_memory(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, stages are launched one by one; the log says so once, when executors are made."""

    class Executor:
        fits_graphs = fits

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def warm_up(self) -> None:
            pass

    backend = SimpleNamespace(forget=lambda: None)
    monkeypatch.setattr(build, "open_backend", lambda *_: backend)
    monkeypatch.setattr(build, "ModelRunner", Executor)
    monkeypatch.setattr(build, "stages_of", lambda *_, **__: None)
    monkeypatch.setattr(build, "clear_workspaces", lambda device: None)
    monkeypatch.setattr(build, "_programs_per_sm", lambda *_: 1)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    config = SimpleNamespace(max_context_tokens=100, num_heads=1, head_dim=8)
    model = SimpleNamespace(device=CUDA, dtype=torch.float16, config=config)
    storage = SimpleNamespace(tiers=(), block_size=16)
    streams = SimpleNamespace(sms=4, stream=object, on_device=nullcontext)
    build.build_executor(model, storage, 64, 4, None, streams)  # type: ignore[arg-type]
    assert fallbacks.limits() == ({} if fits else {"graphs": "eager"})


def test_graphs_need_pinned_memory_only_where_there_is_any() -> None:
    """CUDA reports a tensor without elements as not pinned."""
    device = torch.device("cuda")
    assert suits_graphs([torch.empty(0, 8)], device)
    assert not suits_graphs([torch.empty(0, 8), torch.empty(1)], device)
    assert suits_graphs([torch.empty(1)], torch.device("cpu"))
