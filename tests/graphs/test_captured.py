"""What the profiler times instead of a layer of a graph."""

import gc

import pytest
import torch

from neo_desktop.engine.cuda.streams import WholeDevice
from neo_desktop.engine.cuda.workspaces import clear_workspaces
from neo_desktop.engine.profiling.captured import graph_ms


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_call_in_a_graph_takes_time() -> None:
    x = torch.randn(1024, 1024, device="cuda")
    out = torch.empty_like(x)
    streams = WholeDevice(x.device)
    assert graph_ms(lambda _: torch.mm(x, x, out=out), 4, streams.timing_stream()) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_captured_timings_keep_no_memory() -> None:
    gc.collect()
    clear_workspaces(torch.device("cuda"))
    before = torch.cuda.memory_allocated()
    x = torch.randn(1024, 1024, device="cuda")
    out = torch.empty_like(x)
    streams = WholeDevice(x.device)

    def measure() -> None:
        graph_ms(lambda _: torch.mm(x, x, out=out), 4, streams.timing_stream())

    measure()
    taken = torch.cuda.memory_allocated()
    for _ in range(8):
        measure()
    assert torch.cuda.memory_allocated() <= taken
    clear_workspaces(x.device)
    assert torch.cuda.memory_allocated() == before + x.nbytes + out.nbytes
