"""What the profiler times instead of a layer of a graph."""

import pytest
import torch
from kv_pools import spoiled
from pipeline_case import tiny_model

from neo_desktop.engine.kv.device_layer import DeviceLayer
from neo_desktop.engine.kv.storage import KVPool
from neo_desktop.engine.profiling.captured import fused_linear, graph_ms
from neo_desktop.models.linear import Linear


def test_the_linear_stages_of_any_number_of_decodes_store_nothing() -> None:
    model = tiny_model((None,))
    for layer in model.layers:
        for name in ("qkv", "output", "gate_up", "down"):
            setattr(layer, name, Linear(getattr(layer, name).dense()))
    pool = spoiled(KVPool(model.config, 4, 16, model.dtype, model.device, DeviceLayer))
    with torch.inference_mode():
        for tokens in (1, 3, 5):
            fused_linear(model, pool, tokens)(0)
    assert all(part.isnan().all() for part in pool.parts)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_call_in_a_graph_takes_time() -> None:
    x = torch.randn(1024, 1024, device="cuda")
    out = torch.empty_like(x)
    assert graph_ms(lambda _: torch.mm(x, x, out=out), 4) > 0
