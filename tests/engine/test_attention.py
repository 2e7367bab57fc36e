"""Blocks that move within an iteration."""

import random
from itertools import product

import pytest
import torch
from executors import carry_out_copies
from kv_pools import spoiled
from seeds import seeds
from torch_layer import TorchLayer

from neo_desktop.engine.batch import BlockCopy
from neo_desktop.engine.execute import moves as block_moves
from neo_desktop.engine.kv.host_layer import HostLayer
from neo_desktop.engine.kv.layer import KVLayer, slots_of
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.models.shapes import shape

CONFIG = shape("qwen3-0.6b")
CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM = CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim
BLOCK_SIZE = 16


def make_storage(
    num_blocks: int, block_size: int = BLOCK_SIZE, device_kind: type[KVLayer] = TorchLayer
) -> KVStorage:
    kinds = {KVTier.DEVICE: device_kind, KVTier.HOST: HostLayer}
    return KVStorage(
        {
            tier: spoiled(KVPool(CONFIG, num_blocks, block_size, torch.float32, CPU, kind))
            for tier, kind in kinds.items()
        }
    )


@pytest.mark.parametrize("seed", seeds(8, 20))
def test_block_copies_are_carried_out_in_their_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One move frees a block, and a later move may fill it again."""
    monkeypatch.setattr(block_moves, "TOKENS_AT_ONCE", (5, BLOCK_SIZE, 40)[seed % 3])
    rng = random.Random(seed)
    storage = make_storage(4, device_kind=(TorchLayer, HostLayer)[seed % 2])
    shape = (BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    before = {
        (tier, block): float(4 * index + block)
        for index, tier in enumerate(MEASURED_TIERS)
        for block in range(4)
    }
    for layer, ((tier, block), value) in product((0, 2), before.items()):
        slots = slots_of(torch.tensor([block]), BLOCK_SIZE)
        storage[tier].layer(layer).write(torch.full(shape, value), torch.full(shape, -value), slots)
    expected = dict(before)
    copies = []
    for _ in range(rng.randint(0, 12)):
        source, target = rng.choice([(a, b) for a, b in product(expected, expected) if a[0] is not b[0]])
        copies.append(BlockCopy(*source, *target))
        expected[target] = expected[source]
    carry_out_copies(CONFIG, torch.float32, storage, copies)
    found = torch.empty(2, *shape)
    for layer in (0, 2):
        for (tier, block), value in expected.items():
            storage[tier].layer(layer).read(slots_of(torch.tensor([block]), BLOCK_SIZE), found)
            assert (found[0] == value).all()
            assert (found[1] == -value).all()


def test_a_move_of_many_blocks_is_one_group() -> None:
    storage = make_storage(8)
    streamed = [BlockCopy(KVTier.DEVICE, block, KVTier.HOST, 7 - block) for block in range(8)]
    assert len(storage.copy_groups(streamed)) == 1


def test_blocks_written_twice_are_not_written_at_once() -> None:
    """The result of two simultaneous writes is undefined on a GPU."""
    copies = [BlockCopy(KVTier.DEVICE, 0, KVTier.HOST, 1), BlockCopy(KVTier.DEVICE, 2, KVTier.HOST, 1)]
    assert len(make_storage(3).copy_groups(copies)) == 2
