"""Products with matrices of which a part lies in host memory (HeteGen, section 4.2).

Rows of such a matrix lie on the device, or in host memory. Of the latter some are brought to the device for
each product; with the others the CPU multiplies. All three at the same time:

    device     |norm|rows of the device|piece 0|piece 1|        |activation|rows of the device|piece 2|..
    weights    |piece 0|piece 1|piece 2|..        |piece 3|..
    to-host         |x|                                         |x|
    cpu               |rows of the CPU         |                  |rows of the CPU ..
    to-device                                  |its product|

Pieces come in the order of their use, as far ahead as there are buffers for them: nothing of the computation
holds them up but that.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.engine.cuda.copies import host_memory
from neo_desktop.engine.execute.host_experts import ExpertRoom, HostExperts
from neo_desktop.engine.execute.host_work import HostWork
from neo_desktop.engine.execute.lane import Lane, Launcher, Signal
from neo_desktop.engine.execute.offloaded_experts import DividedMoE, ExpertPass
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.execute.weight_stream import NUM_BUFFERS, Staging, WeightStream
from neo_desktop.models.decoder import TURN, LayerWeights
from neo_desktop.models.expert_pieces import ExpertPiece
from neo_desktop.models.linear.offloaded import OffloadedLinear, Piece
from neo_desktop.models.stages import DividedExperts, Product, Stages, Step
from neo_desktop.native.relay import RelayProduct, empty_flags

_Room = TypeVar("_Room", bound="HostRoom | ExpertRoom")


def splits_of(weights: LayerWeights) -> Iterator[tuple[str, OffloadedLinear]]:
    """Yield the offloaded matrices of a layer and their names."""
    linears = ((name, weights.linear(name)) for name in TURN)
    yield from ((name, linear) for name, linear in linears if isinstance(linear, OffloadedLinear))


@dataclass(frozen=True, slots=True)
class Divided:
    """A matrix whose rows in host memory are divided between bus and CPU."""

    split: OffloadedLinear
    first_row: int  # of those of the CPU
    pieces: Sequence[Piece]
    matrix: native.Matrix | None  # the CPU's; None: it has no rows

    @property
    def host_rows(self) -> int:
        """How many rows the CPU has."""
        return self.split.rows - self.first_row


@dataclass
class HostProduct(HostWork):
    """The CPU's part in the products with the matrices of one name, in each turn of a sub-batch.

    A turn is what lies between the attention of two layers: it ends a layer and begins the next one.
    """

    name: str
    index: int  # of the sub-batch
    rows: int
    divided: Mapping[int, Divided]  # by turn
    num_turns: int
    room: "HostRoom"
    busy_ns: int = 0  # how long the CPU multiplied, in all turns

    @property
    def flags(self) -> Tensor:
        return self.room.flags[self.name]

    def x(self, turn: int) -> Tensor:
        """Return where the turn's input goes, [rows, columns]."""
        columns = self.divided[turn].split.columns
        return self.room.x[: self.rows * columns].view(self.rows, columns)

    def out(self, turn: int) -> Tensor:
        """Return where its product comes, [rows, rows of the matrix that the CPU has]."""
        width = self.divided[turn].host_rows
        return self.room.out[: self.rows * width].view(self.rows, width)

    @property
    def arguments(self) -> RelayProduct:
        """What relays are told."""
        matrices = [
            None if (divided := self.divided.get(turn)) is None else divided.matrix
            for turn in range(self.num_turns)
        ]
        x, lag = self.x(min(self.divided)), int(self.name != "qkv")
        return RelayProduct(self.name, lag, matrices, x, self.room.out, self.flags, self.divided, self.index)

    def stage(self, turn: int) -> Stage:
        """See `HostWork`; so much for each turn."""
        return Stage(f"{self.name} on the CPU", turn, self.index, self.rows)

    def carry_out(self, turn: int) -> None:
        """Multiply with the CPU's rows."""
        divided = self.divided[turn]
        streamed = divided.first_row - divided.split.resident_rows
        divided.split.multiply_host(self.x(turn), self.out(turn), streamed)


class HostRoom:
    """Host memory through which a sub-batch and the CPU give each other inputs and products.

    The products of a sub-batch follow each other, so that all use the same memory.

    Args:
        rows: of a sub-batch.
        splits: the matrices.
        flags: of the sub-batch, by the matrices' names.
        dtype: of the model.
        device: likewise.
    """

    def __init__(
        self,
        rows: int,
        splits: Iterable[OffloadedLinear],
        flags: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        splits = list(splits)
        columns = max((split.columns for split in splits), default=0)
        width = max((split.host_rows for split in splits), default=0)

        def room(numbers: int) -> Tensor:
            return host_memory(lambda pin: torch.empty(numbers, dtype=dtype, pin_memory=pin), device)

        self.rows = rows
        self.flags = flags
        self.x = room(rows * columns)
        self.out = room(rows * width)

    @property
    def on_host(self) -> Iterator[Tensor]:
        """What a graph copies from and to."""
        yield from (self.x, self.out, *self.flags.values())


class _Rooms(Generic[_Room]):
    """The host memory of each sub-batch; of more rows than graphs have it is made when it is needed.

    Args:
        make: what makes that of a sub-batch for so many rows.
        rows: of each, in graphs.
    """

    def __init__(self, make: Sequence[Callable[[int], _Room]], rows: Sequence[int]) -> None:
        self._make = make
        self.of_graphs = [make_it(count) for make_it, count in zip(make, rows, strict=False)]
        self._largest = list(self.of_graphs)

    def of(self, index: int, rows: int) -> _Room:
        """Return that of a sub-batch, for so many rows."""
        if rows <= self.of_graphs[index].rows:
            return self.of_graphs[index]
        if rows > self._largest[index].rows:
            self._largest[index] = self._make[index](rows)
        return self._largest[index]


class OffloadedMatmuls:
    """The offloaded matrices of a model, and what products with them work in: kept for all iterations.

    Args:
        stages: of a model with offloaded matrices, be they of experts.
        rows: of each sub-batch: with so many its memory is the same in each iteration.
    """

    def __init__(self, stages: Stages, rows: Sequence[int]) -> None:
        self._decoder = decoder = stages.decoder
        self.num_turns = decoder.config.num_layers + 1
        self.splits = stages.offloaded_matrices
        self._names = [name for name in TURN if any(name == each for _, each in self.splits)]
        self._divided: dict[float, dict[tuple[int, str], Divided]] = {}
        self._divided_moe: dict[float, dict[int, DividedMoE]] = {}
        device, dtype = decoder.device, decoder.dtype
        flags = [
            {
                name: host_memory(lambda pin: empty_flags(self.num_turns, pinned=pin), device)
                for name in self._names
            }
            for _ in rows
        ]
        self._rooms = _Rooms(
            [
                partial(HostRoom, splits=self.splits.values(), flags=of_it, dtype=dtype, device=device)
                for of_it in flags
            ],
            rows,
        )
        moe_layers = stages.moe_layers.items()
        self.moe_layers = {layer + 1: each for layer, each in moe_layers if each.on_host is not None}
        of_experts = [
            host_memory(lambda pin: empty_flags(self.num_turns, pinned=pin), device)
            for _ in (rows if self.moe_layers else ())
        ]
        self._expert_rooms = _Rooms(
            [partial(ExpertRoom, decoder=decoder, flags=of_it) for of_it in of_experts], rows
        )
        pieces: list[Piece | ExpertPiece] = []
        for split in self.splits.values():
            pieces += split.pieces(split.host_rows)
        for moe in self.moe_layers.values():
            pieces += moe.pieces(moe.num_on_host, dtype)
        most = max((piece.nbytes for piece in pieces), default=0)
        numbers = max((piece.elements for piece in pieces), default=0)
        rooms: list[HostRoom | ExpertRoom] = [*self._rooms.of_graphs, *self._expert_rooms.of_graphs]
        self.on_host = [tensor for room in rooms for tensor in room.on_host]  # what graphs copy from and to
        sources = [source for piece in pieces for source in piece.sources]
        self.staging = Staging.of(sources, len(rows), device)
        if self.staging is None:
            self.on_host += sources
        else:
            self.on_host += [source for source in sources if not self.staging.takes(source)]
            self.on_host += self.staging.on_host
        self.buffers = [torch.empty(most, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
        self.room = torch.empty(numbers, dtype=dtype, device=device)  # a piece's, unpacked

    def divided(self, rows: int) -> Mapping[tuple[int, str], Divided]:
        """Return how the matrices are divided for so many rows, by turn and name, in the order of a turn."""
        share = self._decoder.streamed_shares.of(rows)
        if share not in self._divided:
            self._divided[share] = {key: _divide(self.splits[key], share) for key in self._in_order}
        return self._divided[share]

    def of_rows(self, index: int, rows: int, turns: range) -> "OffloadedPass":
        """Return the products of a sub-batch, or of rows of several, in some turns.

        One after the other: those of a sub-batch share memory.
        """
        room = self._rooms.of(index, rows)
        divided = {key: each for key, each in self.divided(rows).items() if key[0] in turns}
        hosts = {}
        for name in self._names:
            of_host = {turn: each for (turn, other), each in divided.items() if other == name and each.matrix}
            if of_host:
                hosts[name] = HostProduct(name, index, rows, of_host, self.num_turns, room)
        return OffloadedPass(self, index, rows, divided, hosts, self._experts(index, rows, turns))

    def stream(self, pieces: Iterable[tuple[Stage, Piece | ExpertPiece]]) -> WeightStream:
        """Return what brings the pieces of an iteration, in the order in which they are taken."""
        return WeightStream(pieces, self.buffers, self.staging)

    def divided_moe(self, rows: int) -> Mapping[int, DividedMoE]:
        """Return how the experts are divided for so many rows, by turn."""
        share, dtype = self._decoder.streamed_experts.of(rows), self._decoder.dtype
        if share not in self._divided_moe:
            self._divided_moe[share] = {
                turn: DividedMoE.of(moe, share, dtype) for turn, moe in self.moe_layers.items()
            }
        return self._divided_moe[share]

    def _experts(self, index: int, rows: int, turns: range) -> ExpertPass:
        divided = {turn: each for turn, each in self.divided_moe(rows).items() if turn in turns}
        of_host = {turn: each.moe for turn, each in divided.items() if each.has_host_part}
        host = None
        if of_host:
            host = HostExperts(index, rows, of_host, self.num_turns, self._expert_rooms.of(index, rows))
        return ExpertPass(divided, host, self.room)

    @property
    def _in_order(self) -> list[tuple[int, str]]:
        return sorted(self.splits, key=lambda key: (key[0], TURN.index(key[1])))


def _divide(split: OffloadedLinear, share: float) -> Divided:
    streamed = split.streamed(share)
    matrix = split.host_matrix(streamed)
    return Divided(split, split.resident_rows + streamed, split.pieces(streamed), matrix)


@dataclass
class OffloadedPass:
    """The products of rows of a sub-batch, on their way through the turns."""

    products: OffloadedMatmuls
    index: int
    rows: int
    divided: Mapping[tuple[int, str], Divided]  # by turn and name, in order
    hosts: Mapping[str, HostProduct]
    experts: ExpertPass

    @property
    def on_host(self) -> list[HostWork]:
        """What the CPU computes, in the order of a turn."""
        before: list[HostWork] = [host for name, host in self.hosts.items() if name == "output"]
        others: list[HostWork] = [host for name, host in self.hosts.items() if name != "output"]
        return [*before, *([] if self.experts.host is None else [self.experts.host]), *others]

    def stream(self) -> WeightStream:
        """Return what brings the pieces of all turns."""
        turns = range(self.products.num_turns)
        return self.products.stream(piece for turn in turns for piece in self.pieces(turn))

    def pieces(self, turn: int) -> Iterator[tuple[Stage, Piece | ExpertPiece]]:
        """Yield what comes to the device in a turn."""
        stage = Stage("weights", turn, self.index, self.rows)
        for name in TURN:
            if name == "qkv" and turn in self.experts.divided:  # in the place of gate_up and down
                yield from ((stage, piece) for piece in self.experts.divided[turn].pieces)
            if (turn, name) in self.divided:
                yield from ((stage, piece) for piece in self.divided[turn, name].pieces)

    def advance(
        self,
        launcher: Launcher,
        stream: WeightStream,
        stage: Stage,
        steps: Iterable[Step],
        after: Sequence[Signal] = (),
    ) -> Sequence[Signal]:
        """Give the steps of a stage to the lanes; return what ends with them.

        Args:
            stage: of the device.
            steps: all until the next attention.
            after: what they wait for.
        """
        for step in steps:
            if step.work is None:
                launcher.wait(after)
                made = launcher.mark()
            else:
                made = launcher.run(Lane.DEVICE, stage, step.work, after)
            after = (made,)
            if isinstance(step.product, DividedExperts):
                after = self.experts.submit(launcher, stream, stage, step.product, made)
            elif isinstance(step.product, Product):
                after = self._multiply(launcher, stream, stage, step.product, made)
        return after

    def _multiply(
        self, launcher: Launcher, stream: WeightStream, stage: Stage, product: Product, made: Signal
    ) -> list[Signal]:
        """Give a product to the lanes; return what ends with it, beside the device's lane."""
        turn, x, out = stage.layer, product.x, product.out
        divided = self.divided[turn, product.name]
        split, first = divided.split, divided.first_row
        brought = []
        if divided.matrix is not None:
            host = self.hosts[product.name]
            what = Stage(product.name, turn, self.index, self.rows)
            send = partial(host.x(turn).copy_, x, non_blocking=True)
            sent = launcher.run(Lane.TO_HOST, what, send, (made,))
            multiplied = launcher.host(Lane.CPU, host.stage(turn), host.step(turn), (sent,))
            bring = partial(out[:, first:].copy_, host.out(turn), non_blocking=True)
            brought.append(launcher.run(Lane.TO_DEVICE, what, bring, (multiplied,)))
        if split.resident is not None:
            launcher.run(Lane.DEVICE, stage, partial(split.multiply_resident, x, out))
        for piece in divided.pieces:
            staged, arrived = stream.take()
            multiply = partial(split.multiply_piece, piece, staged, self.products.room, x, out)
            stream.give_back(launcher, launcher.run(Lane.DEVICE, stage, multiply, (arrived,)))
        return brought
