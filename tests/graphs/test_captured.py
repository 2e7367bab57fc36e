"""What the profiler times instead of a layer of a graph."""

import gc

import pytest
import torch
from pipeline_case import tiny_model

from neo_desktop.engine.cuda.streams import WholeDevice
from neo_desktop.engine.cuda.workspaces import clear_workspaces
from neo_desktop.engine.profiling.captured import fused_linear, graph_ms
from neo_desktop.models.linear import Linear


def test_a_layer_of_a_graph_is_a_layer_of_the_decoder() -> None:
    """Without attention: what would be its output is whatever lies in the memory, zeros."""
    model = tiny_model((None, None))
    for layer in model.layers:
        for name in ("qkv", "output", "gate_up", "down"):
            setattr(layer, name, Linear(getattr(layer, name).dense()))
    with torch.inference_mode():
        for tokens in (1, 3):
            call, memory = fused_linear(model, tokens)
            call(1)
            hidden = model.embed(torch.zeros(tokens, dtype=torch.int64))
            no_output = torch.zeros(tokens, model.config.num_heads, model.config.head_dim)
            expected = model.post_attention(1, hidden, no_output)
            torch.testing.assert_close(memory.residual + memory.x, expected, rtol=1e-4, atol=1e-4)


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
