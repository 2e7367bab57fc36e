"""Rows are written to their slots and nowhere else, rounded as by torch, and read back."""

import pytest
import torch
from paged_case import DTYPES
from torch import Tensor

from neo_desktop.native import available_isas, empty_paired_keys, paged_kv_read, paged_kv_write

each_isa = pytest.mark.parametrize("isa", available_isas())


def same(a: Tensor, b: Tensor) -> bool:
    """Return True if bits are equal, with any NaN equal to any other."""
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
    k_cache = empty_paired_keys(
        5, kv_heads=3, page_tokens=block_size, head_dim=head_dim, dtype=target
    ).zero_()
    v_cache = torch.zeros(5, 3, block_size, head_dim, dtype=target)
    rows = torch.randn(40, 3, head_dim, generator=generator).to(source)
    slots = torch.randperm(5 * block_size, generator=generator)[:40]
    paged_kv_write(rows, rows, k_cache, v_cache, slots)
    assert torch.equal(k_cache.flatten(-2), v_cache)
    assert torch.equal(v_cache[slots // block_size, :, slots % block_size], rows.to(target))


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


@each_isa
@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("paired", [False, True], ids=["rows", "pairs"])
def test_reading_equals_indexing(isa: str, stored: torch.dtype, target: torch.dtype, paired: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    k_cache, v_cache = (torch.randn(4, 3, 64, 72, generator=generator).to(stored) for _ in range(2))
    expected = [cache.transpose(1, 2).flatten(0, 1) for cache in (k_cache, v_cache)]
    if paired:
        keys = empty_paired_keys(4, kv_heads=3, page_tokens=64, head_dim=72, dtype=stored)
        k_cache = keys.copy_(k_cache.unflatten(-1, (-1, 2)))
    whole_page, part, scattered = torch.arange(128, 192), torch.arange(5, 70), torch.tensor([255, 0, 0, 77])
    slots = torch.cat((whole_page, part, scattered))
    out = torch.full((2, len(slots) + 1, 4, 72), 7.0).to(target)
    for num_threads in (1, 3):
        paged_kv_read(k_cache, v_cache, slots, out[0, :-1, :3], out[1, :-1, :3], num_threads, isa=isa)
        for found, rows in zip(out, expected, strict=True):
            assert torch.equal(found[:-1, :3], rows[slots].to(target))
        assert (out[:, -1] == 7).all()
        assert (out[:, :, 3] == 7).all()


@each_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_was_written_is_read(isa: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    k_cache = empty_paired_keys(3, kv_heads=2, page_tokens=64, head_dim=128, dtype=dtype)
    v_cache = torch.empty(3, 2, 64, 128, dtype=dtype)
    rows = [torch.randn(192, 2, 128, generator=generator).to(dtype) for _ in range(2)]
    slots = torch.randperm(192, generator=generator)
    paged_kv_write(*rows, k_cache, v_cache, slots, isa=isa)
    again = [torch.empty_like(each) for each in rows]
    paged_kv_read(k_cache, v_cache, slots, *again, isa=isa)
    assert all(torch.equal(one, other) for one, other in zip(rows, again, strict=True))
