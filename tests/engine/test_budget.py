"""Size KV memory from free memory, other programs' use, and caps."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from neo_desktop.app.simulate.traced_shapes import TRACED_SHAPES
from neo_desktop.engine.kv.layout import BLOCK_SIZE, BLOCKS_PER_RUN
from neo_desktop.engine.kv_tier import ALL_TIERS, MEASURED_TIERS, KVTier
from neo_desktop.engine.options import GIB, EngineOptions
from neo_desktop.engine.profiling import budget
from neo_desktop.engine.profiling.budget import (
    DEVICE_MARGIN_BYTES,
    DEVICE_RESERVE_BYTES,
    LEAST_SLOTS,
    STATES_SHARE,
    FreeMemory,
    KVBudget,
    activation_bytes,
    chat_lengths,
    most_slots,
    num_slots,
)
from neo_desktop.engine.profiling.hardware import HostMemory
from neo_desktop.engine.profiling.weight_memory import QUANTISATIONS, check_weights_fit
from neo_desktop.engine.schedule.policies import POLICIES
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.models.shapes import shape
from neo_desktop.models.stored_form import uniform_form

CONFIG = shape("llama-2-7b")
DTYPE = torch.float16
LIMITS = SchedulerLimits(max_batch_tokens=2048, max_batch_requests=256)
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
WEIGHTS = CONFIG.weight_bytes(DTYPE)
ITERATION = activation_bytes(CONFIG, LIMITS, DTYPE) + DEVICE_RESERVE_BYTES


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the free memory of a fake machine, for the test to change."""
    free = SimpleNamespace(gpu=8 * GIB, host=64 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free.gpu, 80 * GIB))
    monkeypatch.setattr(budget, "host_memory", lambda: HostMemory(free.host, free.host, None))
    monkeypatch.setattr(budget, "find_gpus", lambda: ((), "", ()))
    return free


def kv_budget(
    device: torch.device,
    free: FreeMemory | None = None,
    tiers: Sequence[KVTier] = MEASURED_TIERS,
    **options: object,
) -> KVBudget:
    """Return the budget of a model with these options; `gpu` and `cpu` are caps in bytes."""
    for name in ("gpu", "cpu"):
        if name in options:
            options[f"{name}_memory_gib"] = cast("int", options.pop(name)) / GIB
    chosen = EngineOptions(**options)  # type: ignore[arg-type]
    return KVBudget(CONFIG, DTYPE, device, chosen, free or FreeMemory.now(device), WEIGHTS, tiers)


def kv(device: torch.device, **options: object) -> dict[KVTier, int]:
    return kv_budget(device, **options).available


def test_gpu_kv_is_what_is_free_less_what_an_iteration_needs(machine: SimpleNamespace) -> None:
    assert kv(CUDA)[KVTier.DEVICE] == machine.gpu - ITERATION


def test_once_iterations_have_run_what_they_took_counts_and_a_margin(machine: SimpleNamespace) -> None:
    """By then, free memory excludes what CUDA and the libraries have allocated."""

    def kv_after(iteration_bytes: int, **options: object) -> int:
        return kv_budget(CUDA, FreeMemory.now(CUDA, iteration_bytes), **options).available[KVTier.DEVICE]

    reckoned = activation_bytes(CONFIG, LIMITS, DTYPE)
    assert kv_after(0) == machine.gpu - reckoned - DEVICE_MARGIN_BYTES
    assert kv_after(reckoned + GIB) == machine.gpu - reckoned - GIB - DEVICE_MARGIN_BYTES
    assert kv_after(0) > kv(CUDA)[KVTier.DEVICE]
    # A cap covers all memory of the program.
    cap = WEIGHTS + ITERATION + 2 * GIB
    assert kv_after(0, gpu=cap) == 2 * GIB
    assert kv_after(reckoned + GIB, gpu=cap) == GIB
    machine.gpu = reckoned + GIB
    with pytest.raises(MemoryError, match="max_batch_tokens"):
        kv_after(reckoned + GIB)


def test_a_gpu_cap_bounds_weights_activations_kv_and_reserve_together(machine: SimpleNamespace) -> None:
    cap = WEIGHTS + ITERATION + 2 * GIB
    assert kv(CUDA, gpu=cap)[KVTier.DEVICE] == 2 * GIB
    machine.gpu = ITERATION + GIB  # less free memory than the cap
    assert kv(CUDA, gpu=cap)[KVTier.DEVICE] == GIB


def test_a_gpu_cap_below_the_weights_is_refused_with_what_is_needed(machine: SimpleNamespace) -> None:
    with pytest.raises(MemoryError, match=r"capped at 5\.00 GiB.*raise the cap above 13\.\d\d GiB"):
        kv(CUDA, gpu=5 * GIB)


def test_a_full_gpu_is_refused_instead_of_failing_later(machine: SimpleNamespace) -> None:
    machine.gpu = ITERATION - 1
    with pytest.raises(MemoryError, match="close other programs"):
        kv(CUDA)


def test_host_kv_is_half_of_what_is_available_unless_a_cap_allows_more(machine: SimpleNamespace) -> None:
    buffers = budget.host_buffer_bytes(CONFIG, LIMITS, DTYPE)
    assert kv(CUDA)[KVTier.HOST] == 32 * GIB - buffers
    assert kv(CUDA, cpu=10 * GIB)[KVTier.HOST] == 10 * GIB - buffers
    assert kv(CUDA, cpu=48 * GIB)[KVTier.HOST] == 48 * GIB - buffers
    assert kv(CUDA, cpu=640 * GIB)[KVTier.HOST] == int(0.9 * 64 * GIB) - buffers


def test_without_a_gpu_both_pools_share_the_host_and_each_cap_is_for_its_kv(machine: SimpleNamespace) -> None:
    assert kv(CPU) == {KVTier.DEVICE: 16 * GIB, KVTier.HOST: 16 * GIB}
    capped = kv(CPU, gpu=2 * GIB, cpu=1000 * GIB)
    assert capped[KVTier.DEVICE] == 2 * GIB
    assert sum(capped.values()) < 64 * GIB


@given(
    name=st.sampled_from(["qwen3.8-27b", "qwen3.6-35b-a3b", "nemotron-3-nano", "lfm2.5-8b-a1b"]),
    room=st.integers(GIB, 64 * GIB),
    kept=st.none() | st.integers(0, 200_000),
)
def test_states_take_what_the_kv_of_a_long_chat_leaves(name: str, room: int, kept: int | None) -> None:
    config = TRACED_SHAPES[name]
    token_bytes = config.kv_bytes_per_token(torch.bfloat16)
    slots = num_slots(config, LIMITS, room, token_bytes, kept)
    states = slots * config.state_bytes
    assert LEAST_SLOTS <= slots <= most_slots(LIMITS)
    lengths = chat_lengths(config) if kept is None else [kept]
    had_room = [tokens for tokens in lengths if tokens * token_bytes <= (1 - STATES_SHARE) * room]
    if slots > LEAST_SLOTS:
        assert room - states >= max(had_room, default=0) * token_bytes
    if slots < most_slots(LIMITS) and had_room:  # more would take the memory of that KV
        assert room - states - config.state_bytes < max(had_room) * token_bytes
    if kept is None:
        assert states > STATES_SHARE * room - config.state_bytes or slots == most_slots(LIMITS)


@pytest.mark.parametrize("tiers", [MEASURED_TIERS, (KVTier.DEVICE, KVTier.STREAMED), ALL_TIERS])
def test_a_long_chat_of_a_hybrid_keeps_its_kv_on_the_card(tiers: Sequence[KVTier]) -> None:
    """Beside more requests, and also if KV is streamed."""
    config, options = TRACED_SHAPES["qwen3.6-35b-a3b"], EngineOptions()
    free = FreeMemory(64 * GIB, 4 * GIB)

    def found(**given: int) -> tuple[int, int]:
        each = KVBudget(config, torch.bfloat16, CUDA, replace(options, **given), free, 0, tiers, 0.05)
        return each.num_blocks()[KVTier.DEVICE] * BLOCK_SIZE, each.most_requests

    tokens, requests = found()
    assert tokens >= 65_536
    assert requests >= 6
    short = found(gpu_cache_tokens=8192)
    assert short[0] == 8192
    assert short[1] > requests
    assert found(gpu_cache_tokens=80_000)[0] == 80_000


def test_blocks_never_hold_more_than_the_bytes(machine: SimpleNamespace) -> None:
    capped = kv_budget(CUDA, gpu=WEIGHTS + ITERATION + GIB, cpu=7 * GIB)
    blocks, available = capped.num_blocks(), capped.available
    block_bytes = BLOCK_SIZE * CONFIG.kv_bytes_per_token(DTYPE)
    for tier, count in blocks.items():
        assert count % BLOCKS_PER_RUN == 0  # host memory is allocated in whole runs
        assert count * block_bytes <= available[tier] < (count + BLOCKS_PER_RUN) * block_bytes


@pytest.mark.parametrize(
    "tiers", [(KVTier.DEVICE, KVTier.STREAMED), (KVTier.DEVICE, KVTier.STREAMED, KVTier.HOST)]
)
def test_swapped_kv_and_the_other_pools_together_take_no_more(
    machine: SimpleNamespace, tiers: tuple[KVTier, ...]
) -> None:
    """The GPU holds three streamed layers, host memory holds all but one."""
    blocks = kv_budget(CUDA, tiers=tiers).num_blocks()
    available, of_block = kv(CUDA), BLOCK_SIZE * CONFIG.kv_bytes_per_token(DTYPE)
    on_device, on_host = (
        blocks[KVTier.STREAMED] * of_block * 3 / 32,
        blocks[KVTier.STREAMED] * of_block * 31 / 32,
    )
    assert blocks[KVTier.STREAMED] > blocks[KVTier.DEVICE]  # streaming must add capacity
    assert blocks[KVTier.DEVICE] * of_block + on_device <= available[KVTier.DEVICE]
    assert blocks.get(KVTier.HOST, 0) * of_block + on_host <= available[KVTier.HOST]
    assert on_device <= available[KVTier.DEVICE] / 8


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("asked", [{}, {"gpu": 400}, {"cpu": 1000}, {"gpu": 400, "cpu": 1000}])
def test_every_policy_has_room_under_every_cap(
    machine: SimpleNamespace, device: torch.device, policy: str, asked: dict[str, int]
) -> None:
    machine.host = 17 * GIB
    tiers = POLICIES[policy].tiers
    sizes = {f"{label}_cache_tokens": tokens for label, tokens in asked.items()}
    blocks = kv_budget(device, tiers=tiers, **sizes).num_blocks()
    assert set(blocks) == set(tiers)
    assert any(blocks.values())
    for tier, count in blocks.items():
        assert count == asked.get(tier.label, count * BLOCK_SIZE) // BLOCK_SIZE


def test_a_cpu_cache_in_8_bits_holds_nearly_twice_the_tokens(machine: SimpleNamespace) -> None:
    """For K and V, a head takes 128 bytes and a 4-byte scale per token, instead of 256 bytes."""
    blocks = kv_budget(CUDA, cpu=7 * GIB).num_blocks()
    in_8_bits = kv_budget(CUDA, cpu=7 * GIB, cpu_cache_dtype="int8").num_blocks()
    assert in_8_bits[KVTier.DEVICE] == blocks[KVTier.DEVICE]
    token_bytes = CONFIG.num_layers * CONFIG.num_kv_heads * 2 * (128 + 4)
    assert in_8_bits[KVTier.HOST] == kv(CUDA, cpu=7 * GIB)[KVTier.HOST] // token_bytes // 64 * BLOCKS_PER_RUN
    assert in_8_bits[KVTier.HOST] / blocks[KVTier.HOST] == pytest.approx(256 / 132, rel=1e-2)


def test_tokens_that_do_not_fit_under_the_cap_are_refused(machine: SimpleNamespace) -> None:
    capped = kv_budget(CUDA, gpu=WEIGHTS + ITERATION + GIB, gpu_cache_tokens=4096)  # 2 GiB
    with pytest.raises(MemoryError, match="ask for at most 2048 tokens"):
        capped.num_blocks()


def test_weights_must_fit_into_what_is_free_and_under_the_cap(machine: SimpleNamespace) -> None:
    machine.gpu = 80 * GIB
    check_weights_fit(CONFIG, DTYPE, CUDA, EngineOptions(gpu_memory_gib=20), FreeMemory.now(CUDA))
    with pytest.raises(MemoryError, match=r"capped at 8\.0 GiB"):
        check_weights_fit(CONFIG, DTYPE, CUDA, EngineOptions(gpu_memory_gib=8), FreeMemory.now(CUDA))
    machine.gpu = 8 * GIB
    with pytest.raises(MemoryError, match=r"8\.6 GB of GPU memory are free"):
        check_weights_fit(CONFIG, DTYPE, CUDA, EngineOptions(), FreeMemory.now(CUDA))


@pytest.mark.parametrize(
    ("free_gib", "offer"), [(12, "in Q8_0 would fit"), (8, "in Q6_K"), (6, "in Q4_K_M"), (3, None)]
)
def test_weights_that_do_not_fit_are_refused_with_a_quantisation_that_would(
    machine: SimpleNamespace, free_gib: int, offer: str | None
) -> None:
    machine.host = free_gib * GIB
    with pytest.raises(MemoryError, match="of host memory are free") as caught:
        check_weights_fit(CONFIG, DTYPE, CPU, EngineOptions(), FreeMemory.now(CPU))
    assert (offer or "close other programs") in str(caught.value)
    assert ("would fit" in str(caught.value)) is (offer is not None)
    if offer is not None:
        name = str(caught.value).partition("of it in ")[2].split()[0]
        form = uniform_form(CONFIG, QUANTISATIONS[name])
        check_weights_fit(CONFIG, DTYPE, CPU, EngineOptions(), FreeMemory.now(CPU), form)
        rest = FreeMemory(machine.host - CONFIG.weight_bytes(DTYPE, form), None)
        blocks = kv_budget(CPU, rest).num_blocks()
        assert min(blocks.values()) * BLOCK_SIZE > 900
