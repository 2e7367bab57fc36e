"""Rows come back from the KV storage as they went in, however it lays them out and wherever they move."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from kv_pools import in_rows, spoiled
from torch import Tensor

from neo_desktop.engine.batch import BlockCopy
from neo_desktop.engine.kv.gathered_attention import gathered_decode_attention
from neo_desktop.engine.kv.layout import BlockLayout, quantized
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.kv.transfer import Carrier
from neo_desktop.engine.placement import Place
from neo_desktop.models.shapes import shape

CPU = torch.device("cpu")
CONFIG = replace(shape("tiny"), num_layers=2)
KV_HEADS, HEAD_DIM = CONFIG.num_kv_heads, CONFIG.head_dim
NUM_BLOCKS = 6

# dtype, block size, whether K lies in rows
KINDS = [
    *product((torch.float32, torch.float16, torch.bfloat16), (16, 32), (False, True)),
    (torch.float32, 8, True),
    (torch.int8, 16, False),
    (torch.int8, 48, False),
]
each_kind = pytest.mark.parametrize(("dtype", "block_size", "rows"), KINDS)


def make_pool(dtype: torch.dtype, block_size: int, rows: bool) -> KVPool:
    if not rows:
        return spoiled(KVPool(CONFIG, NUM_BLOCKS, block_size, dtype, CPU))
    with in_rows():
        return spoiled(KVPool(CONFIG, NUM_BLOCKS, block_size, dtype, CPU))


def some_rows(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    k, v = (torch.randn(count, KV_HEADS, HEAD_DIM).to(dtype) for _ in range(2))
    return k, v


def assert_close(
    found: Tensor, stored: Tensor, dtype: torch.dtype, last_dtype: torch.dtype = torch.float32
) -> None:
    """In a 16-bit dtype and in fp32 nothing is lost; in int8, half a step of a row's largest element.

    And then what is lost when that is rounded to the last dtype on the way.
    """
    if dtype is torch.int8:
        largest = stored.abs().amax(-1, keepdim=True)
        rounding = 0.0 if last_dtype is torch.int8 else torch.finfo(last_dtype).eps / 2
        assert ((found - stored).abs() <= largest * (0.505 / 127 + rounding)).all()
    else:
        assert torch.equal(found, stored)


@each_kind
def test_rows_come_back_as_they_were_written(dtype: torch.dtype, block_size: int, rows: bool) -> None:
    torch.manual_seed(0)
    pool = make_pool(dtype, block_size, rows)
    model_dtype = torch.float32 if dtype is torch.int8 else dtype
    slots = torch.randperm(NUM_BLOCKS * block_size)[: 3 * block_size]
    k, v = some_rows(len(slots), model_dtype)
    pool.layer(1).write(k, v, slots)
    blocks = torch.randperm(NUM_BLOCKS)
    at = torch.argsort(blocks)[slots // block_size] * block_size + slots % block_size
    for found, stored in zip(pool.layer(1).read(blocks, model_dtype), (k, v), strict=True):
        assert found.shape == (NUM_BLOCKS * block_size, KV_HEADS, HEAD_DIM)
        assert_close(found[at], stored, dtype)
        others = torch.ones(len(found), dtype=torch.bool).index_fill(0, at, False)
        assert found[others].isnan().all()
    assert all(found.isnan().all() for found in pool.layer(0).read(blocks, model_dtype))


@each_kind
def test_blocks_made_from_rows_are_those_that_were_written(
    dtype: torch.dtype, block_size: int, rows: bool
) -> None:
    """What a device makes of rows before they cross the bus is what the native kernel would have written."""
    torch.manual_seed(1)
    pool = make_pool(dtype, block_size, rows)
    k, v = some_rows(2 * block_size, torch.float32 if dtype is torch.int8 else dtype)
    written, put = pool.layer(0), pool.layer(1)
    blocks = torch.tensor([4, 1])
    written.write(k, v, (blocks[:, None] * block_size + torch.arange(block_size)).flatten())
    put.put(blocks, pool.layout.blocks(k, v))
    for one, other in zip(written.take(blocks), put.take(blocks), strict=True):
        if dtype is torch.int8 and one.dtype is torch.int8:
            assert (one.int() - other.int()).abs().max() <= 1  # a tie may go either way
            assert (one != other).float().mean() < 1e-3
        else:
            assert torch.equal(one, other)


@each_kind
def test_a_block_that_goes_to_rows_and_back_is_the_same(
    dtype: torch.dtype, block_size: int, rows: bool
) -> None:
    """So nothing more is lost by moving between the memories again and again."""
    torch.manual_seed(2)
    layout = make_pool(dtype, block_size, rows).layout
    model_dtype = torch.float16 if dtype is torch.int8 else dtype
    once = layout.blocks(*some_rows(3 * block_size, model_dtype))
    again = layout.blocks(*layout.rows(once, model_dtype))
    assert all(torch.equal(one, other) for one, other in zip(once[:2], again[:2], strict=True))
    for one, other in zip(once[2:], again[2:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("source", "target"), [(a, b) for a, b in product(KINDS, KINDS) if a[1] == b[1] == 16]
)
def test_blocks_move_between_places_of_any_layout_and_dtype(
    source: tuple[torch.dtype, int, bool], target: tuple[torch.dtype, int, bool]
) -> None:
    torch.manual_seed(3)
    pools = {Place.DEVICE: make_pool(*source), Place.HOST: make_pool(*target)}
    coarsest = min((source[0], target[0]), key=lambda dtype: (dtype.is_floating_point, dtype.itemsize))
    common = torch.bfloat16  # of which fp32 and, at this size, fp16 lose nothing
    k, v = (rows.mul(4).round().div(4).to(common) for rows in some_rows(NUM_BLOCKS * 16))
    for pool in pools.values():
        pool.layer(0).write(torch.zeros_like(k), torch.zeros_like(v), torch.arange(len(k)))
    pools[Place.DEVICE].layer(0).write(k, v, torch.arange(len(k)))
    moves = [(0, 5), (3, 2), (4, 0)]
    (group,) = KVStorage(pools).copy_groups(
        [BlockCopy(Place.DEVICE, old, Place.HOST, new) for old, new in moves]
    )
    group.copy_layer(0, Carrier(CPU))
    old, new = (torch.tensor(blocks) for blocks in zip(*moves, strict=True))
    found = pools[Place.HOST].layer(0).read(new, torch.float32)
    for rows, stored in zip(found, (k, v), strict=True):
        assert_close(rows, stored.float().unflatten(0, (-1, 16))[old].flatten(0, 1), coarsest, target[0])
    untouched = pools[Place.HOST].layer(0).read(torch.tensor([1, 3, 4]), torch.float32)
    assert all((rows == 0).all() for rows in untouched)


@each_kind
@pytest.mark.parametrize("window", [None, 20])
def test_decode_attention_stores_the_new_token_and_attends_to_what_is_stored(
    dtype: torch.dtype, block_size: int, rows: bool, window: int | None
) -> None:
    torch.manual_seed(4)
    pool = make_pool(dtype, block_size, rows)
    model_dtype = torch.float32 if dtype is torch.int8 else dtype
    layer, order = pool.layer(0), torch.randperm(NUM_BLOCKS)
    tables = order.view(2, -1).int()
    lens = torch.tensor([1, 2 * block_size + 3], dtype=torch.int32)
    earlier = [
        tables[r, t // block_size] * block_size + t % block_size for r in (0, 1) for t in range(lens[r] - 1)
    ]
    k, v = some_rows(len(earlier) + 2, model_dtype)
    layer.write(k[2:], v[2:], torch.tensor(earlier, dtype=torch.int64))
    slots = torch.tensor([tables[0, 0] * block_size, tables[1, 2] * block_size + 2], dtype=torch.int64)
    q = torch.randn(2, CONFIG.num_heads, HEAD_DIM).to(model_dtype)
    out = torch.empty_like(q)
    layer.decode(q, k[:2], v[:2], slots, tables, lens, out, CONFIG.attention_scale, window)

    caches = [
        stored.unflatten(0, (-1, block_size)).transpose(1, 2)
        for stored in layer.read(torch.arange(NUM_BLOCKS), torch.float32)
    ]
    expected = gathered_decode_attention(q.float(), *caches, tables, lens, CONFIG.attention_scale, window)
    tolerance = 1e-5 if model_dtype is torch.float32 else 2 * torch.finfo(model_dtype).eps
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


def test_a_row_that_is_not_finite_does_not_look_as_if_it_were() -> None:
    rows = torch.ones(4, 1, 8)
    rows[1, 0, 3], rows[2, 0, 5], rows[3] = torch.nan, -torch.inf, 0.0
    codes, scale = quantized(rows)
    assert scale[0] == pytest.approx(1 / 127)
    assert scale[1:3].isnan().all()
    assert scale[3] == 0
    assert (codes[0] == 127).all()
    assert (codes[3] == 0).all()


@each_kind
def test_bytes_are_those_of_the_memory(dtype: torch.dtype, block_size: int, rows: bool) -> None:
    pool = make_pool(dtype, block_size, rows)
    taken = sum(part.nbytes for part in pool.parts)
    assert taken == pool.layout.block_bytes * NUM_BLOCKS * CONFIG.num_layers


def test_8_bits_need_host_memory_and_blocks_of_a_multiple_of_16_tokens() -> None:
    with pytest.raises(ValueError, match="multiple of 16 tokens, not cpu memory and blocks of 24"):
        KVPool(CONFIG, 1, 24, torch.int8, CPU)
    with pytest.raises(ValueError, match="not cuda memory and blocks of 16"):
        BlockLayout.of(CONFIG, 16, torch.int8, torch.device("cuda"))
