"""Blocks come out of the cache and go back as they were."""

import pytest
import torch

from neo_desktop.engine.kernels.block_copy import gather_blocks, scatter_blocks

NUM_BLOCKS, BLOCK_SIZE = 9, 16
BLOCKS = torch.tensor([4, 0, 8, 3])


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 64), (3, 80), (8, 128)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_blocks_go_both_ways(kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    shape = (NUM_BLOCKS, BLOCK_SIZE, kv_heads, head_dim)
    # As the parts of one block may lie one after the other: a block is contiguous, two are not.
    k_cache, v_cache = torch.randn(NUM_BLOCKS, 2, *shape[1:]).to(dtype).to(device).unbind(1)
    buffer = torch.empty(2, len(BLOCKS) * BLOCK_SIZE, kv_heads, head_dim, dtype=dtype, device=device)
    blocks = BLOCKS.to(device)

    gather_blocks(k_cache, v_cache, blocks, buffer)
    assert torch.equal(buffer, torch.stack([cache[blocks].flatten(0, 1) for cache in (k_cache, v_cache)]))

    targets = [torch.zeros(shape, dtype=dtype, device=device) for _ in "kv"]
    scatter_blocks(*targets, blocks, buffer)
    for target, cache in zip(targets, (k_cache, v_cache), strict=True):
        expected = torch.zeros_like(target)
        expected[blocks] = cache[blocks]
        assert torch.equal(target, expected)
