"""Moves of KV blocks between tiers within an iteration, one layer ahead of the computation."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from neo_desktop.engine.execute.attender import Attender
from neo_desktop.engine.execute.lane import Lane, Launcher, Signal
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, Stage
from neo_desktop.engine.execute.transfers import Transfer, TransferMemory
from neo_desktop.engine.kv.layer import Rows
from neo_desktop.engine.kv.storage import CopyGroup, KVPool, PoolRows

TOKENS_AT_ONCE = 4096  # most tokens per transfer

NAME = "copy blocks"


class Moves(Attender):
    """The block copies between tiers in an iteration, in the plan's order.

    Args:
        groups: See `KVStorage.copy_groups`.
        make: Makes transfers.
    """

    def __init__(self, groups: Sequence[CopyGroup], make: TransferMemory) -> None:
        self._pieces: list[_Move] = []
        for group in groups:
            pieces = (torch.split(s, TOKENS_AT_ONCE) for s in (group.source_slots, group.target_slots))
            self._pieces += [_piece(group, old, new, make) for old, new in zip(*pieces, strict=True)]
        self._set_up: tuple[Signal, ...] = ()  # the slots must have arrived
        self._moved: dict[int, Sequence[Signal]] = {}  # layer -> ends of its moves
        self.fetches = bool(self._pieces)
        self.tasks = [each.way.task for each in self._pieces if not isinstance(each, _DirectMove)]

    def fetch(self, launcher: Launcher, layer: int) -> None:
        if self._pieces:
            self._set_up = self._set_up or (launcher.mark(),)
        self._moved[layer] = [piece.submit(launcher, layer, self._set_up) for piece in self._pieces]

    def fetched(self, layer: int) -> Sequence[Signal]:
        return self._moved.get(layer, ())


@dataclass(frozen=True, slots=True)
class _MoveToPages:
    source: KVPool
    rows: PoolRows
    way: Transfer

    def submit(self, launcher: Launcher, layer: int, after: Sequence[Signal]) -> Signal:
        _, end = self.way.to_pages(launcher, layer, partial(self._read, layer), after)
        return end

    def _read(self, layer: int, buffer: Rows) -> None:
        if self.source.device.type == "cpu":
            self.rows.read(layer, buffer)
            return
        rows = torch.empty(buffer.shape, dtype=buffer.dtype, device=self.source.device)
        self.rows.read(layer, rows)
        buffer.copy_(rows, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _MoveFromPages:
    target: KVPool
    rows: PoolRows
    way: Transfer

    def submit(self, launcher: Launcher, layer: int, after: Sequence[Signal]) -> Signal:
        return self.way.from_pages(launcher, layer, partial(self._write, layer), after)

    def _write(self, layer: int, buffer: Rows) -> None:
        self.rows.write(layer, buffer.to(self.target.device, non_blocking=True))


@dataclass(frozen=True, slots=True)
class _DirectMove:
    """A move between tiers that the GPU reads and writes, without the CPU."""

    source: KVPool
    target: KVPool
    num_rows: int
    old: PoolRows
    new: PoolRows

    def submit(self, launcher: Launcher, layer: int, after: Sequence[Signal]) -> Signal:
        stage = Stage(NAME, layer, NO_SUB_BATCH, self.num_rows)
        return launcher.run(Lane.SWAP, stage, partial(self._copy, layer), after)

    def _copy(self, layer: int) -> None:
        pool = self.source
        rows = torch.empty(2, self.num_rows, *pool.row_shape, dtype=pool.dtype, device=pool.device)
        self.old.read(layer, rows)
        self.new.write(layer, rows.to(self.target.device, non_blocking=True))


_Move = _MoveToPages | _MoveFromPages | _DirectMove


def _piece(group: CopyGroup, old: Tensor, new: Tensor, make: TransferMemory) -> _Move:
    source, target = group.source, group.target
    if group.to_pages:
        return _MoveToPages(source, source.rows_at(old), make.transfer(NAME, target, new, to_host=True))
    if group.from_pages:
        return _MoveFromPages(target, target.rows_at(new), make.transfer(NAME, source, old, to_host=False))
    return _DirectMove(source, target, len(old), source.rows_at(old), target.rows_at(new))
