"""Size KV memory from free memory, other programs' use, and caps."""

from types import SimpleNamespace

import pytest
import torch

from neo_desktop.engine.kv.layout import BLOCK_SIZE, BLOCKS_PER_RUN
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.profiling import budget
from neo_desktop.engine.profiling.budget import (
    DEVICE_MARGIN_BYTES,
    DEVICE_RESERVE_BYTES,
    GIB,
    FreeMemory,
    MemoryCaps,
    activation_bytes,
)
from neo_desktop.engine.profiling.hardware import HostMemory
from neo_desktop.engine.schedule.policies import POLICIES
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.models.shapes import shape
from neo_desktop.models.stored_form import uniform_form

CONFIG = shape("llama-2-7b")
DTYPE = torch.float16
LIMITS = SchedulerLimits(max_batch_tokens=2048, max_batch_requests=256)
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
ALL_THAT_FITS: dict[KVTier, int | None] = {KVTier.DEVICE: None, KVTier.HOST: None}
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


def kv(device: torch.device, caps: MemoryCaps | None = None) -> dict[KVTier, int]:
    return budget.kv_bytes(CONFIG, DTYPE, LIMITS, FreeMemory.now(device), caps or MemoryCaps())


def test_gpu_kv_is_what_is_free_less_what_an_iteration_needs(machine: SimpleNamespace) -> None:
    assert kv(CUDA)[KVTier.DEVICE] == machine.gpu - ITERATION


def test_once_iterations_have_run_what_they_took_counts_and_a_margin(machine: SimpleNamespace) -> None:
    """By then, free memory excludes what CUDA and the libraries have allocated."""

    def kv_after(iteration_bytes: int, caps: MemoryCaps | None = None) -> int:
        free = FreeMemory.now(CUDA, iteration_bytes)
        return budget.kv_bytes(CONFIG, DTYPE, LIMITS, free, caps or MemoryCaps())[KVTier.DEVICE]

    reckoned = activation_bytes(CONFIG, LIMITS, DTYPE)
    assert kv_after(0) == machine.gpu - reckoned - DEVICE_MARGIN_BYTES
    assert kv_after(reckoned + GIB) == machine.gpu - reckoned - GIB - DEVICE_MARGIN_BYTES
    assert kv_after(0) > kv(CUDA)[KVTier.DEVICE]
    # A cap covers all memory of the program.
    cap = MemoryCaps(gpu_bytes=WEIGHTS + ITERATION + 2 * GIB)
    assert kv_after(0, cap) == 2 * GIB
    assert kv_after(reckoned + GIB, cap) == GIB
    machine.gpu = reckoned + GIB
    with pytest.raises(MemoryError, match="max_batch_tokens"):
        kv_after(reckoned + GIB)


def test_a_gpu_cap_bounds_weights_activations_kv_and_reserve_together(machine: SimpleNamespace) -> None:
    cap = WEIGHTS + ITERATION + 2 * GIB
    assert kv(CUDA, MemoryCaps(gpu_bytes=cap))[KVTier.DEVICE] == 2 * GIB
    machine.gpu = ITERATION + GIB  # less free memory than the cap
    assert kv(CUDA, MemoryCaps(gpu_bytes=cap))[KVTier.DEVICE] == GIB


def test_a_gpu_cap_below_the_weights_is_refused_with_what_is_needed(machine: SimpleNamespace) -> None:
    with pytest.raises(MemoryError, match=r"capped at 5\.00 GiB.*raise the cap above 13\.\d\d GiB"):
        kv(CUDA, MemoryCaps(gpu_bytes=5 * GIB))


def test_a_full_gpu_is_refused_instead_of_failing_later(machine: SimpleNamespace) -> None:
    machine.gpu = ITERATION - 1
    with pytest.raises(MemoryError, match="close other programs"):
        kv(CUDA)


def test_host_kv_is_half_of_what_is_available_unless_a_cap_allows_more(machine: SimpleNamespace) -> None:
    buffers = budget.host_buffer_bytes(CONFIG, LIMITS, DTYPE)
    assert kv(CUDA)[KVTier.HOST] == 32 * GIB - buffers
    assert kv(CUDA, MemoryCaps(cpu_bytes=10 * GIB))[KVTier.HOST] == 10 * GIB - buffers
    assert kv(CUDA, MemoryCaps(cpu_bytes=48 * GIB))[KVTier.HOST] == 48 * GIB - buffers
    assert kv(CUDA, MemoryCaps(cpu_bytes=640 * GIB))[KVTier.HOST] == int(0.9 * 64 * GIB) - buffers


def test_without_a_gpu_both_pools_share_the_host_and_each_cap_is_for_its_kv(machine: SimpleNamespace) -> None:
    assert kv(CPU) == {KVTier.DEVICE: 16 * GIB, KVTier.HOST: 16 * GIB}
    capped = kv(CPU, MemoryCaps(gpu_bytes=2 * GIB, cpu_bytes=1000 * GIB))
    assert capped[KVTier.DEVICE] == 2 * GIB
    assert sum(capped.values()) < 64 * GIB


def test_blocks_never_hold_more_than_the_bytes(machine: SimpleNamespace) -> None:
    caps = MemoryCaps(gpu_bytes=WEIGHTS + ITERATION + GIB, cpu_bytes=7 * GIB)
    blocks = budget.pool_blocks(CONFIG, DTYPE, LIMITS, CUDA, ALL_THAT_FITS, caps)
    block_bytes = BLOCK_SIZE * CONFIG.kv_bytes_per_token(DTYPE)
    available = kv(CUDA, caps)
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
    free = FreeMemory.now(CUDA)
    blocks = budget.pool_blocks(CONFIG, DTYPE, LIMITS, CUDA, ALL_THAT_FITS, free=free, tiers=tiers)
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
@pytest.mark.parametrize(
    "asked", [{}, {KVTier.DEVICE: 400}, {KVTier.HOST: 1000}, {KVTier.DEVICE: 400, KVTier.HOST: 1000}]
)
def test_every_policy_has_room_under_every_cap(
    machine: SimpleNamespace, device: torch.device, policy: str, asked: dict[KVTier, int]
) -> None:
    machine.host = 17 * GIB
    tiers = POLICIES[policy].tiers
    blocks = budget.pool_blocks(CONFIG, DTYPE, LIMITS, device, ALL_THAT_FITS | asked, tiers=tiers)
    assert set(blocks) == set(tiers)
    assert any(blocks.values())
    for tier, tokens in asked.items():
        assert blocks.get(tier, tokens // BLOCK_SIZE) == tokens // BLOCK_SIZE


def test_a_cpu_cache_in_8_bits_holds_nearly_twice_the_tokens(machine: SimpleNamespace) -> None:
    """For K and V, a head takes 128 bytes and a 4-byte scale per token, instead of 256 bytes."""
    caps = MemoryCaps(cpu_bytes=7 * GIB)
    blocks = budget.pool_blocks(CONFIG, DTYPE, LIMITS, CUDA, ALL_THAT_FITS, caps)
    in_8_bits = budget.pool_blocks(CONFIG, DTYPE, LIMITS, CUDA, ALL_THAT_FITS, caps, torch.int8)
    assert in_8_bits[KVTier.DEVICE] == blocks[KVTier.DEVICE]
    token_bytes = CONFIG.num_layers * CONFIG.num_kv_heads * 2 * (128 + 4)
    assert in_8_bits[KVTier.HOST] == kv(CUDA, caps)[KVTier.HOST] // token_bytes // 64 * BLOCKS_PER_RUN
    assert in_8_bits[KVTier.HOST] / blocks[KVTier.HOST] == pytest.approx(256 / 132, rel=1e-2)


def test_tokens_that_do_not_fit_under_the_cap_are_refused(machine: SimpleNamespace) -> None:
    caps = MemoryCaps(gpu_bytes=WEIGHTS + ITERATION + GIB)
    asked = ALL_THAT_FITS | {KVTier.DEVICE: 4096}  # 2 GiB
    with pytest.raises(MemoryError, match="ask for at most 2048 tokens"):
        budget.pool_blocks(CONFIG, DTYPE, LIMITS, CUDA, asked, caps)


def test_weights_must_fit_into_what_is_free_and_under_the_cap(machine: SimpleNamespace) -> None:
    machine.gpu = 80 * GIB
    budget.check_weights_fit(CONFIG, DTYPE, CUDA, MemoryCaps(gpu_bytes=20 * GIB))
    with pytest.raises(MemoryError, match=r"capped at 8\.0 GiB"):
        budget.check_weights_fit(CONFIG, DTYPE, CUDA, MemoryCaps(gpu_bytes=8 * GIB))
    machine.gpu = 8 * GIB
    with pytest.raises(MemoryError, match=r"8\.6 GB of GPU memory are free"):
        budget.check_weights_fit(CONFIG, DTYPE, CUDA, MemoryCaps())


@pytest.mark.parametrize(
    ("free_gib", "offer"), [(12, "in Q8_0 would fit"), (8, "in Q6_K"), (6, "in Q4_K_M"), (3, None)]
)
def test_weights_that_do_not_fit_are_refused_with_a_quantisation_that_would(
    machine: SimpleNamespace, free_gib: int, offer: str | None
) -> None:
    machine.host = free_gib * GIB
    with pytest.raises(MemoryError, match="of host memory are free") as caught:
        budget.check_weights_fit(CONFIG, DTYPE, CPU, MemoryCaps())
    assert (offer or "close other programs") in str(caught.value)
    assert ("would fit" in str(caught.value)) is (offer is not None)
    if offer is not None:
        name = str(caught.value).partition("of it in ")[2].split()[0]
        form = uniform_form(CONFIG, budget.QUANTISATIONS[name])
        budget.check_weights_fit(CONFIG, DTYPE, CPU, MemoryCaps(), form=form)
        rest = FreeMemory(machine.host - CONFIG.weight_bytes(DTYPE, form), None)
        blocks = budget.pool_blocks(CONFIG, DTYPE, LIMITS, CPU, ALL_THAT_FITS, free=rest)
        assert min(blocks.values()) * BLOCK_SIZE > 900
