"""One memory plan for weights and KV, and the errors if memory is short."""

import pytest
import torch

from neo_desktop.app.simulate.traced_shapes import TRACED_SHAPES
from neo_desktop.engine.execute.weight_stream import streaming_bytes
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.options import GIB, EngineOptions
from neo_desktop.engine.predict.offloaded_matmul import Rates
from neo_desktop.engine.predict.weight_plan import WeightPlan, layer_matrices, weight_times
from neo_desktop.engine.profiling import budget, weight_memory
from neo_desktop.engine.profiling.budget import (
    DEVICE_RESERVE_BYTES,
    FreeMemory,
    KVBudget,
    activation_bytes,
)
from neo_desktop.engine.profiling.weight_memory import plan_memory
from neo_desktop.engine.selfcheck.rig import on_levels
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.shapes import shape
from neo_desktop.models.stored_form import uniform_form

CONFIG, DTYPE = shape("llama-2-13b"), torch.float16
WEIGHTS = CONFIG.weight_bytes(DTYPE)
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
RATES = Rates(40e9, 8e11, 20e9, 300e9, 3e13, offload_ms=0.03)
STREAMING_BYTES = streaming_bytes(layer_matrices(CONFIG, DENSE, DTYPE))
TOKEN = CONFIG.kv_bytes_per_token(DTYPE)


@pytest.fixture(autouse=True)
def _nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "find_gpus", lambda: ((), "", ()))


def needed(options: EngineOptions) -> int:
    limits = budget.limits_of(options, CUDA)
    return activation_bytes(CONFIG, limits, DTYPE) + DEVICE_RESERVE_BYTES


def plan(
    gpu_gib: float | None, host_gib: float = 64, device: torch.device = CUDA, **given: object
) -> WeightPlan | None:
    free = FreeMemory(int(host_gib * GIB), None if gpu_gib is None else int(gpu_gib * GIB))
    return plan_memory(CONFIG, DENSE, DTYPE, device, EngineOptions(**given), lambda: RATES, free)  # type: ignore[arg-type]


def test_weights_that_fit_beside_a_little_kv_all_stay_on_the_gpu() -> None:
    least = (WEIGHTS + needed(EngineOptions()) + 1024 * TOKEN) / GIB
    assert plan(least + 0.01) is None
    assert plan(least - 0.01) is not None
    assert plan(40) is None


def test_a_model_that_does_not_fit_leaves_room_for_what_runs_beside_it() -> None:
    options = EngineOptions()
    found = plan(12)
    assert found is not None
    assert found.is_split
    assert 0.2 * WEIGHTS < found.gpu_bytes <= 12 * GIB - needed(options) - STREAMING_BYTES
    alone = plan(12, policy="gpu-only")
    assert alone is not None
    assert alone.gpu_bytes <= 12 * GIB - needed(options) - STREAMING_BYTES - 4096 * TOKEN


def hybrid(name: str, host_bytes: int = 64 * GIB, **given: object) -> WeightPlan:
    """Plan a model in Q4_K on a card of 12 GiB; experts stay."""
    config, options = TRACED_SHAPES[name], EngineOptions(move_experts="off", **given)  # type: ignore[arg-type]
    form, free = uniform_form(config, "Q4_K").on_gpu(dispatch), FreeMemory(host_bytes, 12 * GIB)
    found = plan_memory(config, form, torch.bfloat16, CUDA, options, lambda: RATES, free)
    assert found is not None
    return found


def beside(name: str, found: WeightPlan) -> KVBudget:
    """Return the memory for KV and states on that card."""
    config = TRACED_SHAPES[name]
    form = uniform_form(config, "Q4_K").on_gpu(dispatch)
    left = 12 * GIB - found.gpu_bytes - streaming_bytes(layer_matrices(config, form, torch.bfloat16))
    free = FreeMemory(64 * GIB - found.host_bytes, left)
    given = config, torch.bfloat16, CUDA, EngineOptions(), free, found.gpu_bytes, MEASURED_TIERS
    return KVBudget(*given, has_host_weights=True, planned_tokens=found.device_tokens)


def kv_tokens(name: str, found: WeightPlan) -> int:
    """Return the tokens whose KV has room on that card beside weights and states."""
    return beside(name, found).num_blocks()[KVTier.DEVICE] * BLOCK_SIZE


@pytest.mark.parametrize(
    ("name", "least"), [("qwen3.8-27b", 4096), ("qwen3.6-35b-a3b", 16_384), ("nemotron-3-nano", 32_768)]
)
def test_room_for_the_kv_of_long_chats_costs_a_usual_chat_little(name: str, least: int) -> None:
    found, usual = hybrid(name), hybrid(name, gpu_cache_tokens=4096)
    assert kv_tokens(name, found) >= least
    assert kv_tokens(name, usual) >= 4096
    matrices = layer_matrices(
        TRACED_SHAPES[name], uniform_form(TRACED_SHAPES[name], "Q4_K").on_gpu(dispatch), torch.bfloat16
    )
    found_ms, usual_ms = (weight_times(matrices, each, RATES, 1).ms for each in (found, usual))
    assert found_ms < 1.13 * usual_ms
    assert kv_tokens(name, hybrid(name, gpu_cache_tokens=65_536)) >= 65_536  # for any price


@pytest.mark.parametrize(
    ("name", "least"), [("qwen3.8-27b", 2), ("qwen3.6-35b-a3b", 5), ("nemotron-3-nano", 5)]
)
def test_states_of_more_requests_cost_a_chat_little(
    name: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = hybrid(name)
    monkeypatch.setattr(weight_memory, "MOST_STATES_LOSS", 0.0)
    fewer = hybrid(name)
    assert found.device_tokens == fewer.device_tokens
    assert beside(name, found).most_requests >= max(least, beside(name, fewer).most_requests)
    matrices = layer_matrices(
        TRACED_SHAPES[name], uniform_form(TRACED_SHAPES[name], "Q4_K").on_gpu(dispatch), torch.bfloat16
    )
    found_ms, fewer_ms = (weight_times(matrices, each, RATES, 1).ms for each in (found, fewer))
    assert fewer_ms <= found_ms < 1.025 * fewer_ms


def test_long_chats_get_no_room_that_host_memory_lacks_for_weights() -> None:
    name = "qwen3.6-35b-a3b"
    usual = hybrid(name, gpu_cache_tokens=4096)
    assert hybrid(name).host_bytes > usual.host_bytes + 0.2e9
    found = hybrid(name, host_bytes=int((usual.host_bytes + 0.2e9) / 0.9))
    assert usual.host_bytes <= found.host_bytes <= usual.host_bytes + 0.2e9


def test_a_cap_on_gpu_memory_holds_for_weights_too() -> None:
    found, capped = plan(12), plan(80, gpu_memory_gib=12.0)
    assert found == capped


def test_kv_that_was_asked_for_is_left_room() -> None:
    found = plan(12, gpu_cache_tokens=6000)
    assert found is not None
    assert found.gpu_bytes <= 12 * GIB - needed(EngineOptions()) - STREAMING_BYTES - 6000 * TOKEN


def test_weights_beyond_what_was_asked_for_live_in_host_memory() -> None:
    found = plan(40, gpu_weights_gib=5.0)
    assert found is not None
    assert 4.5 * GIB < found.gpu_bytes <= 5 * GIB
    assert found.host_bytes == WEIGHTS - found.gpu_bytes
    assert plan(40, gpu_weights_gib=30.0) is None


def test_without_a_gpu_weights_are_divided_only_where_it_was_asked_for() -> None:
    assert plan(None, device=CPU) is None
    found = plan(None, device=CPU, gpu_weights_gib=5.0)
    assert found is not None
    assert found.gpu_bytes <= 5 * GIB


@pytest.mark.parametrize(
    ("memory", "given", "message"),
    [
        (
            (12, 16),
            {},
            r"other 1\d\.\d GB and KV do not .* into the 15\.5 GB of host memory .* file of it in Q8_0 would",
        ),
        ((1, 64), {}, "embeddings, head and norms of this model take 0.66 GB"),
        ((12, 64), {"gpu_weights_gib": 11.9}, r"11\.90 GiB of weights were requested .* request less"),
        ((12, 64), {"gpu_weights_gib": 0.2}, "embeddings, head and norms"),
        ((12, 64), {"gpu_weights_gib": 30.0}, "weights takes 26.0 GB"),
        ((None, 16), {}, "GB of host memory are free"),
    ],
)
def test_a_model_that_fits_nowhere_is_refused_with_what_would_help(
    memory: tuple[float | None, float], given: dict[str, object], message: str
) -> None:
    device = CPU if memory[0] is None else CUDA
    with pytest.raises(MemoryError, match=message) as caught:
        plan(*memory, device=device, **given)
    assert any(word in str(caught.value) for word in ("choose", "request less"))


def test_experts_move_if_host_memory_has_room_for_all_of_them() -> None:
    """Copies of the experts on the GPU take at most half of the host memory that is left."""
    config = shape("qwen3-30b-a3b")
    form = uniform_form(config, "Q4_K").on_gpu(dispatch)

    def found(gpu_gib: float, host_gib: float, **given: str) -> WeightPlan | None:
        free, options = FreeMemory(int(host_gib * GIB), int(gpu_gib * GIB)), EngineOptions(**given)  # type: ignore[arg-type]
        return plan_memory(config, form, torch.bfloat16, CUDA, options, lambda: RATES, free)

    moving, staying = found(12, 64), found(12, 16)
    assert moving is not None
    assert staying is not None
    assert moving.moves is not None
    assert staying.moves is None
    assert found(12, 64, move_experts="off") == staying
    with on_levels({"host_memory": "pageable"}):  # copies would block
        assert found(12, 64) == staying
    assert moving.resident_rows == staying.resident_rows
    matrices = layer_matrices(config, form, torch.bfloat16)
    every = sum(sizes.host_bytes for name, sizes in matrices.items() if name.endswith("experts"))
    assert staying.host_bytes < every <= moving.host_bytes
    assert moving.moves.free <= moving.moves.most
    nearly = found(17.5, 64)  # most experts fit
    assert nearly is not None
    assert nearly.moves is None
    assert found(40, 64) is None  # all experts fit
    dense = plan(12)
    assert dense is not None
    assert dense.moves is None
