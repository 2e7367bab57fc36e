"""KV memory of any kind returns the rows that were written, also after moves."""

from dataclasses import replace

import pytest
import torch
from dense_attention import dense
from executors import carry_out_copies
from kv_pools import spoiled
from torch import Tensor
from torch_layer import TorchLayer

from neo_desktop.engine.batch import BlockCopy
from neo_desktop.engine.execute import moves as block_moves
from neo_desktop.engine.kv.host_layer import HostLayer
from neo_desktop.engine.kv.layer import DecodeRows, KVLayer, Rows, block_bytes, slots_of
from neo_desktop.engine.kv.layout import BLOCKS_PER_RUN
from neo_desktop.engine.kv.storage import KVPool, KVStorage, layer_kind
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.remote.session import GpuLayer
from neo_desktop.models.shapes import shape

CPU = torch.device("cpu")
CONFIG = replace(shape("tiny"), num_layers=2)
KV_HEADS, HEAD_DIM = CONFIG.num_kv_heads, CONFIG.head_dim
NUM_BLOCKS = 6  # one page of host memory and half of a second one
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

KINDS = [
    *(
        (kind, dtype, block_size)
        for kind in (HostLayer, TorchLayer, GpuLayer)
        for dtype in FLOATS
        for block_size in (16, 8)
        if kind is not GpuLayer or dtype is not torch.bfloat16  # the interpreter cannot multiply bfloat16
    ),
    (HostLayer, torch.float32, 48),
    (HostLayer, torch.int8, 16),
    (HostLayer, torch.int8, 48),
]
each_kind = pytest.mark.parametrize(("kind", "dtype", "block_size"), KINDS)
each_count = pytest.mark.parametrize("kv_parts", [2, 1])


def make_pool(
    kind: type[KVLayer],
    dtype: torch.dtype,
    block_size: int,
    group: int = 2,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    kv_parts: int = 2,
) -> KVPool:
    of_model = {"attention_sinks": sinks is not None, "attention_softcap": softcap, "kv_parts": kv_parts}
    config = replace(CONFIG, num_heads=group * KV_HEADS, **of_model)
    each = None if sinks is None else [sinks, sinks + 1]
    return spoiled(KVPool(config, NUM_BLOCKS, block_size, dtype, CPU, kind, each))


def some_rows(count: int, dtype: torch.dtype = torch.float32, kv_parts: int = 2) -> Rows:
    return torch.randn(kv_parts, count, KV_HEADS, HEAD_DIM).to(dtype)


def read(layer: KVLayer, slots: Tensor, dtype: torch.dtype, kv_parts: int = 2) -> Rows:
    out = some_rows(len(slots), dtype, kv_parts)
    layer.read(slots, out)
    return out


def model_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype is torch.int8 else dtype


def assert_close(found: Tensor, stored: Tensor, dtype: torch.dtype) -> None:
    """The model's dtype is exact; int8 allows half a step of a row's largest element, plus rounding."""
    if dtype is torch.int8:
        largest = stored.abs().amax(-1, keepdim=True).float()
        rounding = torch.finfo(found.dtype).eps / 2
        assert ((found.float() - stored.float()).abs() <= largest * (0.505 / 127 + rounding)).all()
    else:
        assert torch.equal(found, stored)


@each_count
@each_kind
def test_rows_come_back_as_they_were_written(
    kind: type[KVLayer], dtype: torch.dtype, block_size: int, kv_parts: int
) -> None:
    torch.manual_seed(0)
    pool, rows_dtype = make_pool(kind, dtype, block_size, kv_parts=kv_parts), model_dtype(dtype)
    order = torch.randperm(NUM_BLOCKS * block_size)
    slots, others = order[: 3 * block_size], order[3 * block_size :]
    rows = some_rows(len(slots), rows_dtype, kv_parts)
    pool.layer(1).write(rows[0], rows[-1], slots)
    again = torch.randperm(len(slots))
    for found, stored in zip(read(pool.layer(1), slots[again], rows_dtype, kv_parts), rows, strict=True):
        assert_close(found, stored[again], dtype)
    for layer, unwritten in ((1, others), (0, order)):
        assert all(found.isnan().all() for found in read(pool.layer(layer), unwritten, rows_dtype, kv_parts))


def test_slots_of_blocks_are_theirs_in_order() -> None:
    assert slots_of(torch.tensor([5, 0, 1]), 3).tolist() == [15, 16, 17, 0, 1, 2, 3, 4, 5]
    assert slots_of(torch.tensor([], dtype=torch.int64), 3).tolist() == []


@each_count
@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("at_once", [5, 16, 1000])
@pytest.mark.parametrize("device_kind", [TorchLayer, HostLayer])
@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_blocks_move_between_places_of_any_kind_and_dtype(
    dtype: torch.dtype,
    in_8_bits: bool,
    device_kind: type[KVLayer],
    at_once: int,
    to_host: bool,
    kv_parts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_moves, "TOKENS_AT_ONCE", at_once)
    torch.manual_seed(1)
    host_dtype = torch.int8 if in_8_bits else dtype
    pools = {
        KVTier.DEVICE: make_pool(device_kind, dtype, 16, kv_parts=kv_parts),
        KVTier.HOST: make_pool(HostLayer, host_dtype, 16, kv_parts=kv_parts),
    }
    source, target = (KVTier.DEVICE, KVTier.HOST) if to_host else (KVTier.HOST, KVTier.DEVICE)
    slots = torch.arange(NUM_BLOCKS * 16)
    rows = some_rows(len(slots), dtype, kv_parts)
    zeros = torch.zeros_like(rows[0])
    pools[source].layer(0).write(rows[0], rows[-1], slots)
    pools[target].layer(0).write(zeros, zeros, slots)
    moves = [(0, 5), (3, 2), (4, 0)]
    copies = [BlockCopy(source, old, target, new) for old, new in moves]
    carry_out_copies(replace(CONFIG, kv_parts=kv_parts), dtype, KVStorage(pools), copies)
    old, new = (slots_of(torch.tensor(blocks), 16) for blocks in zip(*moves, strict=True))
    for found, stored in zip(read(pools[target].layer(0), new, dtype, kv_parts), rows, strict=True):
        assert_close(found, stored[old], host_dtype)
    untouched = slots_of(torch.tensor([1, 3, 4]), 16)
    assert not any(found.any() for found in read(pools[target].layer(0), untouched, dtype, kv_parts))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_of_8_bits_lose_nothing_more_by_moving_again_and_again(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    host, device = make_pool(HostLayer, torch.int8, 16), make_pool(TorchLayer, dtype, 16)
    first = {KVTier.HOST: host.with_layers([0]), KVTier.DEVICE: device.with_layers([0])}
    slots, storage = torch.arange(NUM_BLOCKS * 16), KVStorage(first)
    rows = some_rows(len(slots), dtype)
    host.layer(0).write(*rows, slots)  # type: ignore[call-arg]
    for _ in range(5):
        for ways in ((KVTier.HOST, KVTier.DEVICE), (KVTier.DEVICE, KVTier.HOST)):
            copies = [BlockCopy(ways[0], block, ways[1], block) for block in range(NUM_BLOCKS)]
            carry_out_copies(replace(CONFIG, num_layers=1), dtype, storage, copies)
    k, v, k_scale, v_scale = (part[0] for part in host.parts)
    host.layer(1).write(*rows, slots)  # type: ignore[call-arg]
    k_once, v_once, k_scale_once, v_scale_once = (part[1] for part in host.parts)
    assert torch.equal(k[0], k_once[0])  # compare written pages only: others hold any values
    assert torch.equal(v[0], v_once[0])
    for scale, once in ((k_scale, k_scale_once), (v_scale, v_scale_once)):
        torch.testing.assert_close(scale[0], once[0], rtol=4 * torch.finfo(dtype).eps, atol=0)


@each_count
@each_kind
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("group", [2, 4])
def test_decode_attention_stores_the_new_token_and_attends_to_what_is_stored(
    kind: type[KVLayer], dtype: torch.dtype, block_size: int, window: int | None, group: int, kv_parts: int
) -> None:
    torch.manual_seed(4)
    rows_dtype = model_dtype(dtype)
    sinks = torch.randn(group * KV_HEADS).to(rows_dtype) if window is None else None
    softcap = 0.8 if group == 4 else None
    layer = make_pool(kind, dtype, block_size, group, sinks, softcap, kv_parts).layer(0)
    tables = torch.randperm(NUM_BLOCKS).view(2, -1).int()
    lens = torch.tensor([1, 2 * block_size + 3], dtype=torch.int32)
    contexts = [
        slots_of(table.long(), block_size)[:length] for table, length in zip(tables, lens, strict=True)
    ]
    earlier = torch.cat([context[:-1] for context in contexts])
    new = torch.stack([context[-1] for context in contexts])
    rows = some_rows(len(earlier) + 2, rows_dtype, kv_parts)
    k, v = rows[0], rows[-1]
    layer.write(k[2:], v[2:], earlier)
    q = torch.randn(2, group * KV_HEADS, HEAD_DIM).to(rows_dtype)
    out = torch.empty_like(q)
    layer.spec = layer.spec._replace(window=window)
    layer.decode(DecodeRows(q, tables, lens, out, k[:2], v[:2], new))

    for row, context in enumerate(contexts):
        stored = read(layer, context, rows_dtype, kv_parts)
        how = CONFIG.attention_scale, window, sinks, softcap
        expected = dense(q[row : row + 1], stored[0], stored[-1], *how)
        tolerance = 1e-5 if rows_dtype is torch.float32 else 4 * torch.finfo(rows_dtype).eps
        torch.testing.assert_close(out[row : row + 1].double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("block_size", [16, 8])
def test_values_follow_their_keys(block_size: int) -> None:
    """The layout matches the kernel's read order."""
    k, v = make_pool(HostLayer, torch.float16, block_size).parts
    page_bytes = BLOCKS_PER_RUN * block_size * HEAD_DIM * k.itemsize
    assert v[0, 0, 0].data_ptr() - k[0, 0, 0].data_ptr() == page_bytes
    assert k[0, 0, 1].data_ptr() - v[0, 0, 0].data_ptr() == page_bytes


@each_count
@each_kind
def test_bytes_are_those_of_the_memory(
    kind: type[KVLayer], dtype: torch.dtype, block_size: int, kv_parts: int
) -> None:
    """Host memory consists of whole pages: 8 blocks instead of 6."""
    pool = make_pool(kind, dtype, block_size, kv_parts=kv_parts)
    blocks = 2 * BLOCKS_PER_RUN if kind is HostLayer else NUM_BLOCKS
    taken = sum(part.nbytes for part in pool.parts)
    config = replace(CONFIG, kv_parts=kv_parts)
    assert taken == block_bytes(config, block_size, dtype) * blocks * CONFIG.num_layers


def test_memory_is_used_as_fits_its_device() -> None:
    assert layer_kind(CPU) is HostLayer
    assert layer_kind(torch.device("cuda")).__name__ == "DeviceLayer"


def test_8_bits_need_blocks_of_a_multiple_of_16_tokens() -> None:
    with pytest.raises(ValueError, match="multiple of 16 tokens, not of 24"):
        KVPool(CONFIG, 1, 24, torch.int8, CPU)
