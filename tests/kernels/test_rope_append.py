"""One kernel rotates and stores like the models' operators do in several steps."""

import pytest
import torch

from neo_desktop.engine.kernels.dispatch import rope_append
from neo_desktop.models.operators import rope, rotation

pytestmark = pytest.mark.usefixtures("kernel_level")
HEADS, KV_HEADS, BLOCK_SIZE, EPS = 6, 3, 16, 1e-6
SLOTS = torch.tensor([5, -1, 47, 16, -1, 15])  # -1: stored nowhere


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_equals_the_decoder(head_dim: int, normed: bool, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    tokens, width = len(SLOTS), HEADS + 2 * KV_HEADS
    qkv = torch.randn(tokens, width, head_dim).to(dtype)
    qk_norm = torch.rand(HEADS + KV_HEADS, head_dim).to(dtype) if normed else None
    positions = torch.tensor([0, 1, 7, 900, 30_000, 131_071])
    frequencies = 10_000.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2))
    cos, sin = torch.empty(2, tokens, 1, head_dim)
    rotation(positions, frequencies, 1.2, cos, sin)
    expected = qkv.clone()
    rope(expected.view(tokens, -1), cos, sin, KV_HEADS, qk_norm, EPS)
    row = qkv.flatten(1).to(device, copy=True)
    # A head's tokens are contiguous, which tests the strides.
    shape = (3, KV_HEADS, BLOCK_SIZE, head_dim)
    k_cache, v_cache = (
        torch.full(shape, torch.nan, dtype=dtype, device=device).transpose(1, 2) for _ in range(2)
    )

    rope_append(
        row,
        cos.to(device),
        sin.to(device),
        SLOTS.to(device),
        k_cache,
        v_cache,
        None if qk_norm is None else qk_norm.to(device),
        EPS,
    )

    found = row.cpu().view(tokens, width, head_dim)
    assert torch.equal(found[:, -KV_HEADS:], qkv[:, -KV_HEADS:])
    if dtype is torch.float16:  # rounding at any other place would change many more
        assert (found != expected).float().mean() < 0.005
    # The interpreter truncates bf16, a GPU rounds.
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for cache, rows in ((k_cache, found[:, HEADS:-KV_HEADS]), (v_cache, found[:, -KV_HEADS:])):
        by_slot = cache.cpu().reshape(-1, KV_HEADS, head_dim)
        stored = SLOTS >= 0
        assert torch.equal(by_slot[SLOTS[stored]], rows[stored])
        others = torch.ones(len(by_slot), dtype=torch.bool)
        others[SLOTS[stored]] = False
        assert by_slot[others].isnan().all()
