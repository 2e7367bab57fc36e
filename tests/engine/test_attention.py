"""Paged attention equals dense attention, wherever the KV lies and however the work is cut."""

import random
from itertools import pairwise, product

import pytest
import torch
from dense_attention import dense
from kv_pools import spoiled
from torch_layer import TorchLayer

from neo_desktop.engine.batch import BlockCopy, ScheduledSequence, SubBatch
from neo_desktop.engine.execute import prefill
from neo_desktop.engine.execute.attention import place_batches
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.kv import transfer
from neo_desktop.engine.kv.host_layer import HostLayer
from neo_desktop.engine.kv.layer import KVLayer, slots_of
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.kv.transfer import Carrier
from neo_desktop.engine.placement import PLACES, Place
from neo_desktop.models.shapes import shape

CONFIG = shape("qwen3-0.6b")
CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM = CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim
BLOCK_SIZE = 16
SCALE = HEAD_DIM**-0.5


def make_storage(
    num_blocks: int, block_size: int = BLOCK_SIZE, device_kind: type[KVLayer] = TorchLayer
) -> KVStorage:
    kinds = {Place.DEVICE: device_kind, Place.HOST: HostLayer}
    return KVStorage(
        {
            place: spoiled(KVPool(CONFIG, num_blocks, block_size, torch.float32, CPU, kind))
            for place, kind in kinds.items()
        }
    )


@pytest.mark.parametrize("device_kind", [TorchLayer, HostLayer])
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("packed_tokens", [40, 8192])
def test_prompts_in_chunks_and_decodes_in_two_places_equal_dense_attention(
    packed_tokens: int,
    window: int | None,
    block_size: int,
    device_kind: type[KVLayer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each context is computed in several iterations with different cuts; every row must match."""
    monkeypatch.setattr(prefill, "PACKED_TOKENS", packed_tokens)
    torch.manual_seed(0)
    cuts = {
        "a": (Place.DEVICE, [0, 5, 40, 41, 42]),
        "b": (Place.DEVICE, [0, 1, 2, 33, 34]),
        "c": (Place.HOST, [0, 16, 17, 18, 60]),
        "d": (Place.HOST, [0, 31, 47, 63, 64]),
    }
    width = 64 // block_size
    storage = make_storage(5 * width, block_size, device_kind)
    order = torch.randperm(5 * width).tolist()
    tables = {name: IntArray(order[width * i : width * (i + 1)]).view() for i, name in enumerate(cuts)}
    q, k, v = (
        {name: torch.randn(64, heads, HEAD_DIM) for name in cuts} for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    for step in range(4):
        sequences = []
        for name, (place, ends) in cuts.items():
            begin, end = list(pairwise(ends))[step]
            sequences.append(
                ScheduledSequence(name, tuple(range(begin, end)), begin, place, tables[name], None)
            )
        sequences.sort(key=lambda s: (s.place, s.is_decode))
        batches = place_batches(SubBatch(tuple(sequences)), storage)
        rows = [torch.cat([x[s.request_id][s.start : s.context_len] for s in sequences]) for x in (q, k, v)]
        out = torch.empty_like(rows[0])
        for batch in batches.values():
            batch.attend(1, rows[0], rows[1], rows[2], out, SCALE, window)
        row = 0
        for s in sequences:
            expected = dense(
                q[s.request_id][s.start : s.context_len],
                k[s.request_id][: s.context_len],
                v[s.request_id][: s.context_len],
                SCALE,
                window,
            )
            got = out[row : row + len(expected)]
            torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=1e-4)
            row += len(expected)
    for place in PLACES:  # the other layers were not touched
        for part in storage[place].parts:
            assert part[[0, *range(2, CONFIG.num_layers)]].isnan().all()


@pytest.mark.parametrize("seed", range(20))
def test_block_copies_are_carried_out_in_their_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block given up by one move may be the target of the next, and so on."""
    monkeypatch.setattr(transfer, "TOKENS_AT_ONCE", (5, BLOCK_SIZE, 40)[seed % 3])
    rng = random.Random(seed)
    storage = make_storage(4, device_kind=(TorchLayer, HostLayer)[seed % 2])
    shape = (BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    before = {
        (place, block): float(4 * index + block) for index, place in enumerate(PLACES) for block in range(4)
    }
    for layer, ((place, block), value) in product((0, 2), before.items()):
        slots = slots_of(torch.tensor([block]), BLOCK_SIZE)
        storage[place].layer(layer).write(torch.full(shape, value), torch.full(shape, -value), slots)
    expected = dict(before)
    copies = []
    for _ in range(rng.randint(0, 12)):
        source, target = rng.choice([(a, b) for a, b in product(expected, expected) if a[0] is not b[0]])
        copies.append(BlockCopy(*source, *target))
        expected[target] = expected[source]
    groups = storage.copy_groups(copies)
    carrier = Carrier(CONFIG, torch.float32, CPU)
    found = torch.empty(2, *shape)
    for layer in (0, 2):
        for group in groups:
            group.copy_layer(layer, carrier)
        for (place, block), value in expected.items():
            storage[place].layer(layer).read(slots_of(torch.tensor([block]), BLOCK_SIZE), found)
            assert (found[0] == value).all()
            assert (found[1] == -value).all()


def test_a_move_of_many_blocks_is_one_group() -> None:
    storage = make_storage(8)
    swapped = [BlockCopy(Place.DEVICE, block, Place.HOST, 7 - block) for block in range(8)]
    assert len(storage.copy_groups(swapped)) == 1


def test_blocks_written_twice_are_not_written_at_once() -> None:
    """Which of two writes at the same time wins is undefined on a GPU."""
    copies = [BlockCopy(Place.DEVICE, 0, Place.HOST, 1), BlockCopy(Place.DEVICE, 2, Place.HOST, 1)]
    assert len(make_storage(3).copy_groups(copies)) == 2


def test_a_place_torn_apart_is_refused() -> None:
    def decode(name: str, place: Place) -> ScheduledSequence:
        return ScheduledSequence(name, (1,), 0, place, IntArray([0]).view(), None)

    torn = SubBatch((decode("a", Place.DEVICE), decode("b", Place.HOST), decode("c", Place.DEVICE)))
    with pytest.raises(ValueError, match="keep the sequences of a place together"):
        place_batches(torn, make_storage(1))
