"""Offloaded matmuls: matrices with a part of their rows in host memory (HeteGen, section 4.2).

A row of an offloaded matrix is resident on the device or stored in host memory. For each matmul, some rows in
host memory are streamed to the device; the CPU multiplies with the others. All three parts run in parallel:

    device     |norm|resident rows|piece 0|piece 1|        |activation|resident rows|piece 2|..
    weights    |piece 0|piece 1|piece 2|..    |piece 3|..
    to-host         |x|                                    |x|
    cpu               |CPU's rows              |             |CPU's rows ..
    to-device                                  |output|

Pieces are streamed in the order of their use, as far ahead as the buffers allow. The computation holds them
back only by occupied buffers.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.engine.cuda.copies import host_empty, host_flags, suits_graphs
from neo_desktop.engine.execute.expert_moves import ExpertMoves
from neo_desktop.engine.execute.lane import HostTask, Lane, Launcher, Signal
from neo_desktop.engine.execute.layout import BatchMembers
from neo_desktop.engine.execute.offloaded_experts import DividedMoE, ExpertPass, ExpertRoom, HostExperts
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.execute.weight_stream import NUM_BUFFERS, Staging, WeightStream
from neo_desktop.engine.execute.workspace import Memory
from neo_desktop.models.expert_pieces import ExpertPiece
from neo_desktop.models.linear.offloaded import OffloadedLinear, Piece
from neo_desktop.models.ops import DividedExperts, Product
from neo_desktop.models.stages import Stages, Step
from neo_desktop.native.relay import matmul_task

_Room = TypeVar("_Room", bound="HostRoom | ExpertRoom")


@dataclass(frozen=True, slots=True)
class Divided:
    """A matrix whose rows in host memory are divided between bus and CPU."""

    split: OffloadedLinear
    first_row: int  # the CPU's first row
    pieces: Sequence[Piece]
    matrix: native.Matrix | None  # the CPU's rows; None: the CPU has no rows

    @property
    def host_rows(self) -> int:
        """Number of the CPU's rows."""
        return self.split.rows - self.first_row


class HostProduct:
    """The CPU's part in the offloaded matmuls of one name, in every turn of a sub-batch.

    Args:
        divided: turn -> divided matrix
    """

    def __init__(
        self,
        name: str,
        index: int,
        rows: int,
        divided: Mapping[int, Divided],
        num_turns: int,
        room: "HostRoom",
    ) -> None:
        self._rows, self._divided, self._room = rows, divided, room
        matrices = [divided[turn].matrix if turn in divided else None for turn in range(num_turns)]
        x, lag, flags = self.x(next(iter(divided))), int(name != "qkv"), room.flags[name]
        task = matmul_task(name, matrices, x, room.out, flags, lag=lag, owners=divided, index=index)
        self.task = HostTask.of(task, Lane.CPU, f"{name} on the CPU", index, rows)

    def x(self, turn: int) -> Tensor:
        """Return the host buffer of the turn's input, [rows, columns]."""
        columns = self._divided[turn].split.columns
        return self._room.x[: self._rows * columns].view(self._rows, columns)

    def out(self, turn: int) -> Tensor:
        """Return the host buffer of the turn's output, [rows, the CPU's rows of the matrix]."""
        width = self._divided[turn].host_rows
        return self._room.out[: self._rows * width].view(self._rows, width)


class HostRoom:
    """Host buffers for the inputs and outputs of the CPU's matmuls for a sub-batch.

    The matmuls of a sub-batch run one after the other, so all share the same memory.

    Args:
        flags: Matrix name -> flags of the sub-batch.
    """

    def __init__(
        self,
        rows: int,
        splits: Collection[OffloadedLinear],
        flags: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        columns = max((split.columns for split in splits), default=0)
        width = max((split.host_rows for split in splits), default=0)
        self.rows = rows
        self.flags = flags
        self.x = host_empty(rows * columns, dtype, device)
        self.out = host_empty(rows * width, dtype, device)

    @property
    def on_host(self) -> Iterator[Tensor]:
        """The tensors that graphs copy from and to."""
        yield from (self.x, self.out, *self.flags.values())


class _Rooms(Generic[_Room]):
    """Host buffers by sub-batch; more rows than the graphs' get a larger buffer on demand.

    Args:
        make: For each sub-batch, a function that makes a buffer for a number of rows.
        rows: For each sub-batch, the number of rows in graphs.
    """

    def __init__(self, make: Sequence[Callable[[int], _Room]], rows: Sequence[int]) -> None:
        self._make = make
        self.graph_rooms = [make_it(count) for make_it, count in zip(make, rows, strict=False)]
        self._largest = list(self.graph_rooms)

    def of(self, index: int, rows: int) -> _Room:
        """Return the buffer of a sub-batch for `rows` rows."""
        if rows <= self.graph_rooms[index].rows:
            return self.graph_rooms[index]
        if rows > self._largest[index].rows:
            self._largest[index] = self._make[index](rows)
        return self._largest[index]


class OffloadedMatmuls:
    """A model's offloaded matrices and their permanent buffers.

    Args:
        rows: For each sub-batch, the most rows with fixed buffers, which graphs can use.
        moves_experts: True if experts may move.
    """

    def __init__(self, stages: Stages, rows: Sequence[int], *, moves_experts: bool = False) -> None:
        self._decoder = decoder = stages.decoder
        self.num_turns = decoder.config.num_layers + 1
        self.splits = stages.offloaded_matrices
        self.moe_layers = stages.divided_experts
        used = {name for _, name in (*self.splits, *self.moe_layers)}
        self.names = [name for name in stages.turn if name in used]  # in the order of a turn
        # (sub-batch, rows, turns, shares) -> matmuls; making them is slow
        self._passes: dict[tuple[int, int, range, float, float], OffloadedPass] = {}
        self._divided: dict[float, dict[tuple[int, str], Divided]] = {}
        self._divided_moe: dict[float, dict[tuple[int, str], DividedMoE]] = {}
        device, dtype = decoder.device, decoder.dtype
        flags = [{name: host_flags(self.num_turns, device) for name in self.names} for _ in rows]
        self._rooms = _Rooms(
            [
                partial(HostRoom, splits=self.splits.values(), flags=own, dtype=dtype, device=device)
                for own in flags
            ],
            rows,
        )
        expert_flags = flags if self.moe_layers else []
        self._expert_rooms = _Rooms(
            [partial(ExpertRoom, decoder=decoder, flags=own) for own in expert_flags], rows
        )
        pieces: list[Piece | ExpertPiece] = []
        for split in self.splits.values():
            pieces += split.pieces(split.host_rows)
        for moe in self.moe_layers.values():
            pieces += moe.pieces(moe.num_on_host, dtype)
        most = max((piece.nbytes for piece in pieces), default=0)
        numbers = max((piece.elements for piece in pieces), default=0)
        rooms: list[HostRoom | ExpertRoom] = [*self._rooms.graph_rooms, *self._expert_rooms.graph_rooms]
        self.on_host = [tensor for room in rooms for tensor in room.on_host]  # tensors of copies in graphs
        sources = [source for piece in pieces for source in piece.sources]
        self.staging = Staging.of(sources, len(rows), device)
        if self.staging is None:
            self.on_host += sources
        else:
            self.on_host += [source for source in sources if not self.staging.takes(source)]
            self.on_host += self.staging.on_host
        self.buffers = [torch.empty(most, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
        self.room = torch.empty(numbers, dtype=dtype, device=device)  # scratch for an unpacked piece
        slots, experts = decoder.expert_slots, decoder.config.experts
        self.moves: ExpertMoves | None = None  # None: experts stay where they are
        # Copies from pageable memory would block the launching thread.
        if moves_experts and slots is not None and experts is not None and suits_graphs(sources, device):
            turns = {key: moe.slots for key, moe in self.moe_layers.items() if moe.slots is not None}
            self.moves = ExpertMoves(slots, turns, rows, experts.per_token)

    def divided(self, rows: int) -> Mapping[tuple[int, str], Divided]:
        """Return the division of the matrices for `rows` rows, by turn and name, in the order of a turn."""
        share = self._decoder.streamed_shares.of(rows)
        if share not in self._divided:
            self._divided[share] = {key: _divide(split, share) for key, split in self.splits.items()}
        return self._divided[share]

    def of_rows(self, index: int, rows: int, turns: range) -> "OffloadedPass":
        """Return the offloaded matmuls for rows of one or several sub-batches, in a range of turns.

        Matmuls of a sub-batch share memory, so they must run one after the other.
        """
        shares = self._decoder.streamed_shares.of(rows), self._expert_share(rows)
        key = index, rows, turns, *shares
        if key in self._passes:
            return self._passes[key]
        room = self._rooms.of(index, rows)
        divided = {key: each for key, each in self.divided(rows).items() if key[0] in turns}
        hosts = {}
        for name in self.names:
            on_host = {turn: each for (turn, other), each in divided.items() if other == name and each.matrix}
            if on_host:
                hosts[name] = HostProduct(name, index, rows, on_host, self.num_turns, room)
        made = OffloadedPass(self, index, rows, divided, hosts, self._experts(index, rows, turns))
        if rows <= self._rooms.graph_rooms[index].rows:  # only few sizes exist, and their buffers stay
            self._passes[key] = made
        return made

    def stream(self, pieces: Iterable[tuple[Stage, Piece | ExpertPiece]]) -> WeightStream:
        """Return a stream of an iteration's pieces, in the order of their use."""
        return WeightStream(pieces, self.buffers, self.staging)

    def divided_moe(self, rows: int) -> Mapping[tuple[int, str], DividedMoE]:
        """Return the division of the experts for `rows` rows, by turn and name, in the order of a turn."""
        share, dtype = self._expert_share(rows), self._decoder.dtype
        if share not in self._divided_moe:
            self._divided_moe[share] = {
                key: DividedMoE.of(moe, share, dtype) for key, moe in self.moe_layers.items()
            }
        return self._divided_moe[share]

    def _expert_share(self, rows: int) -> float:
        """Return the streamed share of the experts in host memory; 0 if that is less than half an expert."""
        share, experts = self._decoder.streamed_experts.of(rows), self._decoder.config.experts
        return 0.0 if experts is None or round(share * experts.count) == 0 else share

    def prepared_moves(self, parts: Sequence[Memory], members: Sequence[BatchMembers]) -> ExpertMoves | None:
        """Choose moves of experts beside the next iteration, by its sub-batches; None: experts stay."""
        moves = self.moves
        if moves is None:
            return None
        rows = {
            part.index: [
                row
                for sequence, first in each.placed(part.rows)
                for row in range(first, first + len(sequence.token_ids))
            ]
            for part, each in zip(parts, members, strict=True)
        }
        decides = all(
            moves.logs(part.index, part.rows.count)
            and not any(each.streamed for each in self.divided_moe(part.rows.count).values())
            for part in parts
        )
        version = moves.version
        moves.prepare(rows, decides=decides)
        if moves.version != version:  # streamed experts have other addresses
            self._passes = {key: each for key, each in self._passes.items() if not key[-1]}
            self._divided_moe = {share: each for share, each in self._divided_moe.items() if not share}
        return moves

    def _experts(self, index: int, rows: int, turns: range) -> ExpertPass:
        divided = {key: each for key, each in self.divided_moe(rows).items() if key[0] in turns}
        by_cpu = [(key, each.moe) for key, each in divided.items() if each.has_host_part]
        hosts = {}
        for name in dict.fromkeys(name for (_, name), _ in by_cpu):
            of_name, room = {turn: moe for (turn, other), moe in by_cpu if other == name}, self._expert_rooms
            hosts[name] = HostExperts(name, index, rows, of_name, self.num_turns, room.of(index, rows))
        log = {} if self.moves is None else self.moves.log_of(index, rows)
        return ExpertPass(divided, hosts, self.room, log)


def _divide(split: OffloadedLinear, share: float) -> Divided:
    streamed = split.streamed(share)
    matrix = split.host_matrix(streamed)
    return Divided(split, split.resident_rows + streamed, split.pieces(streamed), matrix)


@dataclass
class OffloadedPass:
    """The offloaded matmuls for rows of a sub-batch in a range of turns."""

    products: OffloadedMatmuls
    index: int
    rows: int
    divided: Mapping[tuple[int, str], Divided]  # (turn, name) -> divided matrix, in order
    hosts: Mapping[str, HostProduct]
    experts: ExpertPass

    @property
    def streams_experts(self) -> bool:
        """True if some experts are streamed."""
        return any(each.streamed for each in self.experts.divided.values())

    @property
    def tasks(self) -> list[HostTask]:
        """The CPU's work, in the order of a turn."""
        hosts: Mapping[str, HostProduct | HostExperts] = {**self.hosts, **self.experts.hosts}
        return [hosts[name].task for name in self.products.names if name in hosts]

    def pieces(self, turn: int) -> Iterator[tuple[Stage, Piece | ExpertPiece]]:
        """Yield the pieces that a turn streams to the device."""
        stage = Stage("weights", turn, self.index, self.rows)
        for name in self.products.names:
            key = turn, name
            divided = self.divided.get(key) or self.experts.divided.get(key)
            yield from ((stage, piece) for piece in (divided.pieces if divided else ()))

    def advance(
        self,
        launcher: Launcher,
        stream: WeightStream,
        stage: Stage,
        steps: Iterable[Step],
        after: Sequence[Signal] = (),
    ) -> Sequence[Signal]:
        """Submit the steps of a stage after the signals; return the signals of their end."""
        for step in steps:
            if step.work is None:
                launcher.wait(after)
                made = launcher.mark()
            else:
                made = launcher.run(Lane.DEVICE, stage, step.work, after)
            after = (made,)
            if isinstance(step.cut, DividedExperts):
                after = self.experts.submit(launcher, stream, stage, step.cut, made)
            elif isinstance(step.cut, Product):
                after = self._multiply(launcher, stream, stage, step.cut, made)
        return after

    def _multiply(
        self, launcher: Launcher, stream: WeightStream, stage: Stage, product: Product, made: Signal
    ) -> list[Signal]:
        """Submit an offloaded matmul; return the signals to wait for besides the device's lane."""
        turn, x, out = stage.layer, product.x, product.out
        divided = self.divided[turn, product.name]
        split, first = divided.split, divided.first_row
        brought = []
        if divided.matrix is not None:
            host = self.hosts[product.name]
            what = Stage(product.name, turn, self.index, self.rows)
            send = partial(host.x(turn).copy_, x, non_blocking=True)
            sent = launcher.run(Lane.TO_HOST, what, send, (made,))
            multiplied = launcher.host(host.task, turn, (sent,))
            bring = partial(out[:, first:].copy_, host.out(turn), non_blocking=True)
            brought.append(launcher.run(Lane.TO_DEVICE, what, bring, (multiplied,)))
        if split.resident is not None:
            launcher.run(Lane.DEVICE, stage, partial(split.multiply_resident, x, out))
        for piece in divided.pieces:
            staged, arrived = stream.take()
            multiply = partial(split.multiply_piece, piece, staged, self.products.room, x, out)
            stream.give_back(launcher, launcher.run(Lane.DEVICE, stage, multiply, (arrived,)))
        return brought
