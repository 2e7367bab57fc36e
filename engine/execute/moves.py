"""Moves of KV blocks between tiers within an iteration, one layer ahead of the computation."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from neo_desktop.engine.execute.attender import Attender
from neo_desktop.engine.execute.lane import HostTask, Lane, Launcher, Signal
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, Stage
from neo_desktop.engine.execute.transfers import Transfer, TransferMemory
from neo_desktop.engine.kv.layer import Rows
from neo_desktop.engine.kv.storage import CopyGroup, KVPool, PoolRows

TOKENS_AT_ONCE = 4096  # most tokens per transfer

NAME = "copy blocks"


class Moves(Attender):
    """The block copies between tiers in an iteration, in the plan's order."""

    def __init__(self, groups: Sequence[CopyGroup], make: TransferMemory) -> None:
        self._pieces: list[_Move] = []
        self.tasks: list[HostTask] = []
        for group in groups:
            pieces = (torch.split(s, TOKENS_AT_ONCE) for s in (group.source_slots, group.target_slots))
            for old, new in zip(*pieces, strict=True):
                self._add(group, old, new, make)
        self._set_up: tuple[Signal, ...] = ()  # the slots must have arrived
        self._moved: dict[int, Sequence[Signal]] = {}  # layer -> ends of its moves
        self.fetches = bool(self._pieces)

    def fetch(self, launcher: Launcher, layer: int) -> None:
        if self._pieces:
            self._set_up = self._set_up or (launcher.mark(),)
        self._moved[layer] = [piece(launcher, layer, self._set_up) for piece in self._pieces]

    def fetched(self, layer: int) -> Sequence[Signal]:
        return self._moved.get(layer, ())

    def _add(self, group: CopyGroup, old: Tensor, new: Tensor, make: TransferMemory) -> None:
        """Add the move of rows at the slots `old` of the source to the slots `new` of the target."""
        source, target = group.source, group.target
        if group.to_pages:
            way = make.transfer(NAME, target, new, to_host=True)
            self.tasks.append(way.task)
            self._pieces.append(partial(_to_pages, source, source.rows_at(old), way))
        elif group.from_pages:
            way = make.transfer(NAME, source, old, to_host=False)
            self.tasks.append(way.task)
            self._pieces.append(partial(_from_pages, target, target.rows_at(new), way))
        else:
            rows = source.rows_at(old), target.rows_at(new)
            self._pieces.append(partial(_directly, source, target, len(old), *rows))


_Move = Callable[[Launcher, int, Sequence[Signal]], Signal]
"""Submits the move of a layer's rows after the signals; returns the signal of its end."""


def _to_pages(
    source: KVPool, rows: PoolRows, way: Transfer, launcher: Launcher, layer: int, after: Sequence[Signal]
) -> Signal:
    def read(buffer: Rows) -> None:
        if source.device.type == "cpu":
            rows.read(layer, buffer)
            return
        on_device = torch.empty(buffer.shape, dtype=buffer.dtype, device=source.device)
        rows.read(layer, on_device)
        buffer.copy_(on_device, non_blocking=True)

    return way.to_pages(launcher, layer, read, after)[1]


def _from_pages(
    target: KVPool, rows: PoolRows, way: Transfer, launcher: Launcher, layer: int, after: Sequence[Signal]
) -> Signal:
    def write(buffer: Rows) -> None:
        rows.write(layer, buffer.to(target.device, non_blocking=True))

    return way.from_pages(launcher, layer, write, after)


def _directly(
    source: KVPool,
    target: KVPool,
    num_rows: int,
    old: PoolRows,
    new: PoolRows,
    launcher: Launcher,
    layer: int,
    after: Sequence[Signal],
) -> Signal:
    """Move rows between tiers that the GPU reads and writes, without the CPU."""

    def copy() -> None:
        rows = torch.empty(source.rows_shape(num_rows), dtype=source.dtype, device=source.device)
        old.read(layer, rows)
        new.write(layer, rows.to(target.device, non_blocking=True))

    return launcher.run(Lane.SWAP, Stage(NAME, layer, NO_SUB_BATCH, num_rows), copy, after)
