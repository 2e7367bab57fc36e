"""New keys and values land in their slots, rounded as torch rounds, and nowhere else."""

from collections.abc import Callable

import pytest
import torch
from paged_case import DTYPES
from torch import Tensor

from neo_desktop.native import available_isas, empty_paired_keys, paged_kv_write

each_isa = pytest.mark.parametrize("isa", available_isas())


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, except that one NaN is as good as another."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=0.5), b.nan_to_num(nan=0.5))


@each_isa
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize(("block_size", "head_dim", "tokens"), [(16, 128, 200), (1, 8, 30), (5, 72, 33)])
def test_equals_indexed_assignment(
    isa: str, source: torch.dtype, target: torch.dtype, block_size: int, head_dim: int, tokens: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = (-(-2 * tokens // block_size), 3, block_size, head_dim)
    k_cache, v_cache = (torch.randn(shape, generator=generator).to(target) for _ in range(2))
    k, v = (torch.randn(tokens, 3, head_dim, generator=generator).to(source) for _ in range(2))
    slots = torch.randperm(2 * tokens, generator=generator)[:tokens]
    expected = [cache.clone() for cache in (k_cache, v_cache)]
    for cache, rows in zip(expected, (k, v), strict=True):
        cache[slots // block_size, :, slots % block_size] = rows.to(target)
    paged_kv_write(k, v, k_cache, v_cache, slots, isa=isa)
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 128), (64, 72)])
def test_paired_keys_hold_the_same_rows(
    source: torch.dtype, target: torch.dtype, block_size: int, head_dim: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    k_cache = empty_paired_keys(5, kv_heads=3, block_size=block_size, head_dim=head_dim, dtype=target).zero_()
    v_cache = torch.zeros(5, 3, block_size, head_dim, dtype=target)
    rows = torch.randn(40, 3, head_dim, generator=generator).to(source)
    slots = torch.randperm(5 * block_size, generator=generator)[:40]
    paged_kv_write(rows, rows, k_cache, v_cache, slots)
    assert torch.equal(k_cache.flatten(-2), v_cache)
    assert torch.equal(v_cache[slots // block_size, :, slots % block_size], rows.to(target))


@each_isa
@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_value_survives_widening_and_back(isa: str, narrow: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(narrow).view(-1, 1, 256)
    wide = torch.zeros(256, 1, 1, 256)
    paged_kv_write(values, values, wide, wide.clone(), torch.arange(256), isa=isa)
    assert same(wide.flatten(), values.float().flatten())
    back = torch.zeros(256, 1, 1, 256, dtype=narrow)
    paged_kv_write(wide[:, 0], wide[:, 0], back, back.clone(), torch.arange(256), isa=isa)
    assert same(back.flatten(), values.flatten())


@each_isa
@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16], ids=str)
def test_rounds_like_torch_everywhere(isa: str, narrow: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    bits = torch.randint(-(2**31), 2**31, (2**16,), generator=generator, dtype=torch.int64).int()
    # Ties: halfway between two neighbours of the narrow type, and one step to either side.
    near = torch.arange(0, 0x7C00, 16, dtype=torch.int16).view(narrow).float().view(torch.int32)
    half_step = 0x1000 if narrow == torch.float16 else 0x8000
    ties = torch.cat([near + half_step + step for step in (-1, 0, 1)])
    special = torch.tensor([65504.0, 65519.99, 65520.0, 65536.0, 2**-24, 2**-25, 1e-45, 3.4e38, 0.0, -0.0])
    values = torch.cat([bits.view(torch.float32), ties.view(torch.float32), special])
    values = torch.cat([values, -values])
    values = torch.cat([values, torch.zeros(-len(values) % 256)]).view(-1, 1, 256)
    out = torch.zeros(len(values), 1, 1, 256, dtype=narrow)
    paged_kv_write(values, values, out, out.clone(), torch.arange(len(values)), isa=isa)
    assert same(out.flatten(), values.to(narrow).flatten())


def test_rows_may_be_slices_of_a_fused_projection() -> None:
    qkv = torch.randn(10, 8, 32, generator=torch.Generator().manual_seed(3))
    k, v = qkv[:, 4:6], qkv[:, 6:8]
    both = torch.zeros(4, 2, 2, 4, 32)  # K and V of a block side by side
    paged_kv_write(k, v, both[:, 0], both[:, 1], torch.arange(10))
    assert torch.equal(both[:, 0].transpose(1, 2).reshape(16, 2, 32)[:10], k)
    assert torch.equal(both[:, 1].transpose(1, 2).reshape(16, 2, 32)[:10], v)


def test_no_tokens_is_nothing_to_do() -> None:
    cache = torch.zeros(2, 2, 4, 32)
    paged_kv_write(torch.zeros(0, 2, 32), torch.zeros(0, 2, 32), cache, cache, torch.zeros(0).long())


@pytest.mark.parametrize(
    ("argument", "change", "complaint"),
    [
        ("slots", lambda t: t.clamp(max=-1), r"slots\[0\] is -1, outside the cache's slots 0 to 7"),
        ("slots", lambda t: t + 6, r"slots\[2\] is 8, outside the cache's slots 0 to 7"),
        ("slots", lambda t: t.int(), r"slots has dtype int32; expected int64"),
        ("slots", lambda t: t[:2], r"k has shape \[3, 2, 32\]; expected \[2, 2, 32\] = \[n of slots"),
        ("slots", lambda t: t.view(3, 1), r"slots has shape \[3, 1\]; expected 1 dimensions"),
        ("k", lambda t: t[:, :1], r"k has shape \[3, 1, 32\]"),
        ("v", lambda t: t[:, :, :16], r"v has shape \[3, 2, 16\]"),
        ("v", lambda t: t.long(), r"v has dtype int64"),
        ("v", lambda t: t.mT.contiguous().mT, r"v has strides .*; its last 1 dimension must be contiguous"),
        ("k_cache", lambda t: t[:1].expand(2, -1, -1, -1), r"k_cache is expanded in dimension 0"),
        ("v_cache", lambda t: t.half(), r"v_cache has dtype float16; expected float32"),
    ],
)
def test_names_the_wrong_argument(argument: str, change: Callable[[Tensor], Tensor], complaint: str) -> None:
    given = {
        "k": torch.ones(3, 2, 32),
        "v": torch.ones(3, 2, 32),
        "k_cache": torch.zeros(2, 2, 4, 32),
        "v_cache": torch.zeros(2, 2, 4, 32),
        "slots": torch.arange(3),
    }
    caches = [given["k_cache"], given["v_cache"]]
    given[argument] = change(given[argument])
    with pytest.raises(ValueError, match=complaint):
        paged_kv_write(**given)
    assert not any(cache.any() for cache in caches)
