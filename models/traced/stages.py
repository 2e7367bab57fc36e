"""Stages that are pieces of a graph; see `models.stages` for what is asked of them."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from neo_desktop.models import native_operators
from neo_desktop.models import operators as in_torch
from neo_desktop.models.linear.offloaded import OffloadedLinear
from neo_desktop.models.operators import Operators, Store
from neo_desktop.models.stages import Product, Scratch, Stages, State, Step
from neo_desktop.models.traced.builder import Builder, Code
from neo_desktop.models.traced.capture import CannotCutError
from neo_desktop.models.traced.cut import Cut, cut
from neo_desktop.models.traced.decoder import TracedDecoder
from neo_desktop.models.traced.graph import exported
from neo_desktop.models.traced.lowered import lowered
from neo_desktop.models.traced.places import NotRowsError
from neo_desktop.models.traced.refusals import cannot_cut
from neo_desktop.models.traced.rows import width_of
from neo_desktop.models.traced.segments import Segment, segments
from neo_desktop.native import RowProgram

logger = logging.getLogger(__name__)
CHECKED_ROWS = 3
INPUTS = ("carried", "rotation", "attended")  # of a stage's code


class TracedStages(Stages):
    """The stages of a model of `transformers`; see `Stages`.

    Raises:
        ModelError: it cannot be cut.
    """

    def __init__(self, decoder: TracedDecoder, operators: Operators | None = None) -> None:
        self.decoder = decoder
        self.config = config = decoder.config
        self.has_head = True
        self.moe_layers = {}
        self._reduce = None
        self._weights = decoder
        graph = exported(config.source, decoder.dtype, decoder.spec.aliases)
        try:
            found = cut(graph, decoder.dtype)
            _check_widths(found, decoder)
        except CannotCutError as error:
            raise cannot_cut(config.source, config, error) from None
        on_cpu = native_operators if decoder.device.type == "cpu" else in_torch
        self._operators = operators or on_cpu
        builder = Builder(graph, found, decoder, self._operators)
        self._rotate, every = builder.rotation(), range(len(found.pieces))
        pieces = [builder.piece(index) for index in every]
        self._programs: dict[int, RowProgram] = {}  # by turn, on a CPU, where steps over rows compute it all
        if not self._takes_operators(builder, pieces):
            logger.warning("%s: its operators are not what they look like: it is slower", config.architecture)
            self._rotate = builder.rotation(is_plain=True)
            pieces = [builder.piece(index, is_plain=True) for index in every]
            self._use(pieces, with_programs=False)
        self._head = builder.head()
        self._segments: dict[int, list[Segment]] = {}  # by turn; none where nothing is split
        if decoder.has_splits:
            self._segments = segments(pieces[1:])
        self._rooms = _Rooms()

    def _use(self, pieces: list[fx.GraphModule], *, with_programs: bool = True) -> None:
        codes: list[Code] = [piece.forward for piece in pieces]
        self._embed, self._pieces = codes[0], codes[1:]
        self._programs.clear()
        if self.decoder.device.type != "cpu" or not with_programs:
            return
        for turn, piece in enumerate(pieces[1:]):
            try:
                self._programs[turn] = lowered(piece, self.config, self.decoder.dtype)
            except NotRowsError as error:
                logger.debug("stage %d is computed operator by operator: %s", turn, error)

    @classmethod
    def of(cls, decoder: TracedDecoder, operators: Operators | None = None) -> "TracedStages":
        """Return a decoder's stages, which are made once."""
        if decoder.stages is None:
            decoder.stages = cls(decoder, operators)
        found: TracedStages = decoder.stages
        return found

    def _takes_operators(self, builder: Builder, pieces: list[fx.GraphModule]) -> bool:
        """Use pieces with operators, and return whether they compute what they should."""
        try:
            self._use(pieces)
            return self._is_right(builder)
        except Exception as error:  # of whatever kind: without operators, all of it is torch's
            logger.debug("operators fail (%s: %s)", type(error).__name__, error)
            return False

    def _is_right(self, builder: Builder) -> bool:
        """Return whether pieces of each kind compute with operators and as programs what they do without."""
        decoder, config, rows = self.decoder, self.config, CHECKED_ROWS
        generator = torch.Generator().manual_seed(0)
        positions = torch.arange(1, rows + 1, device=decoder.device)
        of = config, rows, decoder.dtype, decoder.device
        states = [State.empty(*of, Scratch.empty(*of)) for _ in range(3)]
        codes = builder.rotation(is_plain=True), self._rotate, self._rotate
        seen = set()
        for turn in range(len(self._pieces)):
            kind = builder.kind(turn + 1), turn in self._programs
            if kind in seen:
                continue
            seen.add(kind)
            memory = torch.randn(rows, config.carried_width, generator=generator)
            attended = torch.randn(rows, config.num_heads, config.head_dim, generator=generator)
            for state, rotate in zip(states, codes, strict=True):
                state.residual.copy_(memory)
                state.attention.copy_(attended)
                _rotated(rotate, positions, state.cos[:, 0])
            plain: Code = builder.piece(turn + 1, is_plain=True).forward
            theirs, ours, program = states
            for code, state in ((plain, theirs), (self._pieces[turn], ours)):
                self._hand_on(code(*_given(state)), turn, state)
            checked = [ours]
            if turn in self._programs:
                self._programs[turn].run(program.seen_by_native())
                checked.append(program)
            names = ("x",) if turn == len(self._pieces) - 1 else ("residual", "qkv")
            if not all(
                _are_close(getattr(state, name), getattr(theirs, name)) for state in checked for name in names
            ):
                return False
        return True

    @property
    def writes_in_place(self) -> bool:
        """What code makes lies in a graph's own memory; between products that are split it may not."""
        return not self.decoder.has_splits

    def embed(self, token_ids: Tensor, positions: Tensor, state: State) -> None:
        values = self._embed(token_ids[None].long(), positions[None].long())
        _keep(values, state.residual)
        self.rotate(positions, state.cos, state.sin)

    def rotate(self, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Compute what depends on positions alone: all of it lies in `cos`."""
        _rotated(self._rotate, positions, cos[:, 0])

    def advance(
        self, finished: int | None, begun: int | None, state: State, store: Store | None = None
    ) -> None:
        """See `Stages`; what follows a layer's attention and what precedes the next one's are one stage."""
        turn = 0 if finished is None else finished + 1
        if turn in self._programs:
            self._programs[turn].run(state.seen_by_native())
        else:
            self._hand_on(self._pieces[turn](*_given(state)), turn, state)
        self._store(state, store)

    def _hand_on(self, results: Any, turn: int, state: State) -> None:
        """Put what a stage gives into the state."""
        if turn == len(self._pieces) - 1:
            state.x.copy_(results[0][0])
            return
        q, k, v, *carried = results
        _keep(carried, state.residual)
        config = self.config
        heads = state.qkv.view(len(state.qkv), -1, config.head_dim)
        first = 0
        for each in (q, k, v):
            heads[:, first : first + each.shape[1]].copy_(each[0].transpose(0, 1))
            first += each.shape[1]

    def _store(self, state: State, store: Store | None) -> None:
        """Put keys and values into a cache; None: there is none, as behind the last layer."""
        if store is not None:
            _, keys, values = self.heads(state)
            self._operators.write_rows(keys, values, store.k_cache, store.v_cache, store.slots)

    def steps(
        self, finished: int | None, begun: int | None, state: State, store: Store | None = None
    ) -> Iterator[Step]:
        """See `Stages`; what a step computes stays in memory of its own until the last one has read it."""
        turn = 0 if finished is None else finished + 1
        if turn not in self._segments:
            yield Step(partial(self.advance, finished, begun, state, store), None)
            return
        values: dict[str, Any] = {}
        begin = partial(self._begin, values, state)
        for segment in self._segments[turn]:
            split = segment.split
            if split is None:
                yield Step(partial(self._end, begin, segment, values, turn, state, store), None)
                return
            x, out = self._rooms.of(split.columns, split.rows, state)
            named = Product(segment.name, turn - (segment.name != "qkv"), split, x, out)
            yield Step(partial(_run_to_split, begin, segment, values, x), named)
            begin = partial(_take, segment, values, out)

    def _begin(self, values: dict[str, Any], state: State) -> None:
        values.clear()
        values.update(zip(INPUTS, _given(state), strict=True))

    def _end(
        self,
        begin: Callable[[], None],
        segment: Segment,
        values: dict[str, Any],
        turn: int,
        state: State,
        store: Store | None,
    ) -> None:
        begin()
        results = segment.code(*(values[name] for name in segment.takes))
        values.clear()
        self._hand_on(results, turn, state)
        self._store(state, store)

    @property
    def offloaded_matrices(self) -> dict[tuple[int, str], OffloadedLinear]:
        return {
            (turn, segment.name): segment.split
            for turn, of_async_step in self._segments.items()
            for segment in of_async_step
            if segment.split is not None
        }

    def final_norm(self, state: State, out: Tensor) -> None:
        out.copy_(state.x)

    def logits(self, normed: Tensor, out: Tensor) -> Tensor:
        return out.copy_(self._head(normed[None])[0])  # where graphs leave it, and others look for it


def _given(state: State) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a stage's code is called with."""
    return state.residual, state.cos[:, 0], state.attention[None]


class _Rooms:
    """Memory in which products find their input and leave what comes of it, where something follows on them.

    It is the same for all of them, since they follow each other. What became too small is kept: the device
    may still work in it.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, Tensor]] = []

    def of(self, columns: int, width: int, state: State) -> tuple[Tensor, Tensor]:
        """Return [rows, columns] and [rows, width], both contiguous."""
        rows = state.rows
        sizes = rows * columns, rows * width
        if not self._kept or any(len(a) < size for a, size in zip(self._kept[-1], sizes, strict=True)):
            before = self._kept[-1] if self._kept else (state.residual[0, :0], state.residual[0, :0])
            x, out = (
                state.residual.new_empty(max(len(had), 1 << (size - 1).bit_length()))
                for had, size in zip(before, sizes, strict=True)
            )
            self._kept.append((x, out))
        x, out = self._kept[-1]
        return x[: sizes[0]].view(rows, columns), out[: sizes[1]].view(rows, width)


def _run_to_split(begin: Callable[[], None], segment: Segment, values: dict[str, Any], x: Tensor) -> None:
    """Compute what precedes a product with a split matrix, and put its input into `x` [rows, columns]."""
    begin()
    given = segment.code(*(values[name] for name in segment.takes))
    values.update(zip(segment.gives, given, strict=True))
    x.copy_(values[segment.given].reshape(x.shape))


def _take(segment: Segment, values: dict[str, Any], out: Tensor) -> None:
    """Take what a product has left in `out` [rows, width], before the next one needs it."""
    assert segment.product is not None
    values[segment.result] = segment.product.shaped(out.clone(), values[segment.given])


def _check_widths(found: Cut, decoder: TracedDecoder) -> None:
    """Raise CannotCutError where there is no room for what stages hand on."""
    carried = max(sum(width_of(node) for node in piece.carried) for piece in found.pieces)
    if carried > decoder.config.carried_width:
        raise CannotCutError("more than hidden states has to go from layer to layer")
    if sum(width_of(node) for node in found.rotations) > decoder.config.rotation_width:
        raise CannotCutError("too much of it depends on positions")


def _rotated(code: Code, positions: Tensor, memory: Tensor) -> None:
    """Put what stages read of positions beside each other into memory [rows, width]."""
    first = 0
    for value in code(positions[None].long()):
        rows = value.reshape(len(positions), -1)
        memory[:, first : first + rows.shape[1]].copy_(rows)
        first += rows.shape[1]


def _are_close(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether two results differ by rounding at most."""
    off = torch.linalg.vector_norm(ours.double() - theirs.double())
    bound = 1e-3 if theirs.dtype is torch.float32 else 0.03
    return bool(off <= bound * torch.linalg.vector_norm(theirs.double()))


def _keep(values: Any, memory: Tensor) -> None:
    """Put values [1, rows, ..] beside each other into memory [rows, width]."""
    if len(values) == 1:
        (value,) = values
        if value.data_ptr() != memory.data_ptr():
            rows = value.reshape(len(memory), -1)
            memory[:, : rows.shape[1]].copy_(rows)
        return
    together = torch.cat([value.reshape(len(memory), -1) for value in values], dim=1)
    memory[:, : together.shape[1]].copy_(together)
