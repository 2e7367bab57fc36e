"""The relay's matmuls with matrices in host memory, between the attention of two layers."""

import threading
import time

import pytest
import torch
from paged_case import make_case
from relay_case import NUM_LAYERS, batch_of, caches_of, offload
from torch import Tensor

from neo_desktop import native
from neo_desktop.models.linear.tiles import Tiles
from neo_desktop.native.relay import (
    Relay,
    RelayStalledError,
    empty_flags,
    experts_task,
    matmul_task,
)

COLUMNS = 64


class Case:
    """One item with a matrix of another height in every turn; 0 rows mean no matrix."""

    def __init__(self, name: str, lag: int, heights: list[int], count: int = 3, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.inputs = numbers(len(heights), count, COLUMNS)
        self.linears = [
            Tiles(rows, COLUMNS, numbers(rows), torch.float32) if rows else None for rows in heights
        ]
        for linear in self.linears:
            if linear is not None:
                linear.load(0, numbers(linear.rows, COLUMNS))
        self.x, self.out = torch.empty(count, COLUMNS), torch.full((count * max(heights),), torch.nan)
        self.flags = empty_flags(len(heights), pinned=False)
        matrices = [None if linear is None else linear.native for linear in self.linears]
        self.task = matmul_task(name, matrices, self.x, self.out, self.flags, lag=lag, owners=self.linears)

    def expected(self, turn: int) -> Tensor:
        linear = self.linears[turn]
        assert linear is not None
        x = self.inputs[turn]
        return linear.multiply(x, torch.empty(len(x), linear.rows))

    def offload(self, turn: int) -> Tensor:
        """Act as the GPU: write x, raise the flag, wait for the answer's flag, return the product."""
        linear = self.linears[turn]
        assert linear is not None
        self.x.copy_(self.inputs[turn])
        self.flags[0, turn, 0] = 1
        while self.flags[1, turn, 0].item() == 0:
            time.sleep(0)
        return self.out[: len(self.x) * linear.rows].view(len(self.x), linear.rows).clone()

    def run(self) -> None:
        for turn, linear in enumerate(self.linears):
            if linear is not None:
                assert torch.equal(self.offload(turn), self.expected(turn))


def turn_of_a_decoder() -> list[Case]:
    """Return cases of two layers: qkv has no matrix in the last turn, the others have none in the first."""
    return [
        Case("output", 1, [0, 32, 40], seed=1),
        Case("gate_up", 1, [0, 64, 0], seed=2),
        Case("qkv", 0, [48, 100, 0], seed=3),
    ]


def test_products_come_in_order_in_every_turn_that_has_them() -> None:
    relay, cases = Relay(num_threads=2), turn_of_a_decoder()
    for _ in range(2):  # flags and buffers are used again
        relay.start([case.task for case in cases])
        for turn in range(3):
            for case in cases:
                if case.linears[turn] is not None:
                    assert torch.equal(case.offload(turn), case.expected(turn))
        steps = [(step.turn, step.task) for step in relay.finish()]
        assert steps == [(0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


def test_products_take_turns_with_attention_and_transfers() -> None:
    attention = make_case([400, 120, 77], group=2)
    relay, caches, batch = Relay(num_threads=2), caches_of(attention), batch_of(attention)
    before, after = Case("qkv", 0, [32, 0, 48, 0]), Case("output", 1, [0, 40, 16, 80], seed=1)
    rows = torch.randn(2, 2, *attention.k_cache.shape[1::2])
    flags = empty_flags(NUM_LAYERS, pinned=False)
    stored = caches.rows_task(
        "a prompt's KV", torch.tensor([3, 5]), (rows, rows), flags, to_host=True, is_behind=True
    )
    relay.start([after.task, before.task, batch.task(caches), stored])
    stored.flags[0] = 1
    for turn in range(NUM_LAYERS + 1):
        for case in (after, before):
            if case.linears[turn] is not None:
                assert torch.equal(case.offload(turn), case.expected(turn))
        if turn < NUM_LAYERS:
            out = offload(batch, turn)
            assert bool(out.isfinite().all())
    steps = [(step.turn, step.task) for step in relay.finish()]
    assert steps == [
        *[(0, 1), (0, 2)],
        *[(1, 0), (1, 2), (0, 3)],
        *[(2, 0), (2, 1), (2, 2), (1, 3)],
        *[(3, 0), (2, 3)],
    ]


@pytest.mark.parametrize("ends", ["cancelled", "failed"])
def test_nobody_is_left_waiting(ends: str) -> None:
    relay, cases = Relay(num_threads=2), turn_of_a_decoder()
    relay.start([case.task for case in cases], timeout_s=1.0 if ends == "failed" else 0.0)
    cases[2].offload(0)
    if ends == "cancelled":
        relay.cancel()
    waiting = threading.Thread(
        target=lambda: [case.offload(turn) for turn in (1, 2) for case in cases if case.linears[turn]]
    )
    if ends == "cancelled":
        waiting.start()
        with pytest.raises(RuntimeError, match="the iteration was cancelled"):
            relay.finish()
    else:
        said = r"the GPU did not hand over the inputs of output of layer 0 of sub-batch 0 within 1.0 s"
        with pytest.raises(RelayStalledError, match=said):
            relay.finish()
        assert all(bool((case.flags[1, :, 0] == 1).all()) for case in cases)
        waiting.start()
    waiting.join(timeout=60)
    assert not waiting.is_alive()
    relay.start([case.task for case in cases])
    for turn in range(3):
        for case in cases:
            if case.linears[turn] is not None:
                assert torch.equal(case.offload(turn), case.expected(turn))
    relay.finish()


def test_experts_come_in_every_turn_that_has_them_so_many_rows_at_a_time() -> None:
    generator = torch.Generator().manual_seed(0)
    per_layer = []
    for _ in range(2):
        kept = []
        for rows, columns in ((16, 32), (16, 32), (32, 16)):
            kept.append(Tiles(4 * rows, columns, None, torch.float32))
            kept[-1].load(0, torch.randn(4 * rows, columns, generator=generator))
        per_layer.append((native.packed_experts(4, *(tiles.native for tiles in kept)), kept))
    x = torch.randn(5, 32, generator=generator)
    ids = torch.tensor([[0, 3], [-1, 2], [1, 0], [2, -1], [-1, -1]], dtype=torch.int32)
    weights = torch.rand(5, 2, generator=generator)
    experts = [None, *(packed for packed, _ in per_layer)]
    given, out, flags = torch.empty(5, 32), torch.full((5, 32), torch.nan), empty_flags(3, pinned=False)
    scratch = torch.empty(4, 32), torch.empty(4, 16), torch.empty(4, 32)  # for two rows
    tensors = given, ids, weights, *scratch, out
    task = experts_task(experts, tensors, flags, owners=per_layer)
    relay = Relay(num_threads=2)
    relay.start([task])
    for turn, (packed, _) in enumerate(per_layer, 1):
        given.copy_(x * turn)
        flags[0, turn, 0] = 1
        while flags[1, turn, 0].item() == 0:
            time.sleep(0)
        expected = torch.empty(5, 32)
        room = [torch.empty(10, columns) for columns in (32, 16, 32)]
        native.multiply_experts(packed, x * turn, ids, weights, *room, expected)
        assert torch.equal(out, expected)
    assert [(step.turn, step.task) for step in relay.finish()] == [(1, 0), (2, 0)]
    with pytest.raises(ValueError, match=r"flags has shape \[2, 3, 16\]; expected \[2, 2, 16\]"):
        experts_task(experts[:2], tensors, flags)
    with pytest.raises(ValueError, match="room for no row"):
        experts_task(experts, (*tensors[:4], scratch[1][:1], *tensors[5:]), flags)
    assert relay.close()
