"""Rows are written to their slots, and read back from there."""

import pytest
import torch
from torch import Tensor

from neo_desktop.engine.kernels.dispatch import read_rows, write_rows

pytestmark = pytest.mark.usefixtures("kernel_level")
NUM_BLOCKS, BLOCK_SIZE = 3, 16
SLOTS = torch.tensor([5, -1, 47, 16, -1, 15])  # -1: not copied
IS_COPIED = SLOTS >= 0


def caches(kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    shape = (NUM_BLOCKS, BLOCK_SIZE, kv_heads, head_dim)
    k_cache, v_cache = (torch.randn(shape).to(device, dtype) for _ in range(2))
    return k_cache, v_cache


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 64), (3, 80), (9, 128)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("of_slots", [torch.int32, torch.int64], ids=str)
def test_rows_go_into_their_slots_only(
    kv_heads: int, head_dim: int, dtype: torch.dtype, of_slots: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    k_cache, v_cache = caches(kv_heads, head_dim, dtype, device)
    expected = [cache.cpu().clone() for cache in (k_cache, v_cache)]
    # As in a model: views of two matmul outputs of different widths.
    k = torch.randn(len(SLOTS), 2 * kv_heads, head_dim).to(device, dtype)[:, kv_heads:]
    v = torch.randn(len(SLOTS), 3 * kv_heads, head_dim).to(device, dtype)[:, -kv_heads:]
    write_rows(k, v, k_cache, v_cache, SLOTS.to(device, of_slots))
    for cache, rows, wanted in zip((k_cache, v_cache), (k, v), expected, strict=True):
        wanted.flatten(0, 1)[SLOTS[IS_COPIED]] = rows.cpu()[IS_COPIED]
        assert torch.equal(cache.cpu(), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_slots_are_read_in_any_order_and_more_than_once(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    k_cache, v_cache = caches(3, 80, dtype, device)
    slots = torch.cat((SLOTS, SLOTS[:3]))
    is_copied = slots >= 0
    rows = torch.full((2, len(slots), 3, 80), torch.nan, dtype=dtype, device=device)
    read_rows(rows[0], rows[1], k_cache, v_cache, slots.to(device))
    for found, cache in zip(rows.cpu(), (k_cache.cpu(), v_cache.cpu()), strict=True):
        assert torch.equal(found[is_copied], cache.flatten(0, 1)[slots[is_copied]])
        assert found[~is_copied].isnan().all()


def test_no_rows_are_no_launch(device: torch.device) -> None:
    k_cache, v_cache = caches(2, 64, torch.float32, device)
    nothing = torch.empty(0, 2, 64, device=device)
    write_rows(nothing, nothing, k_cache, v_cache, torch.empty(0, dtype=torch.int64, device=device))
