"""`models.stages.Stages` from the pieces of a graph."""

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from neo_desktop.models import native_operators
from neo_desktop.models import operators as in_torch
from neo_desktop.models.attention import specs_of
from neo_desktop.models.linear.offloaded import OffloadedLinear
from neo_desktop.models.linear.quantised import Quantised
from neo_desktop.models.linear.quantised_gpu import QuantisedOnGPU
from neo_desktop.models.moe import MoE
from neo_desktop.models.operators import Operators, Store
from neo_desktop.models.ops import DividedExperts, Product
from neo_desktop.models.recurrent import RecurrentBatch, fresh_batch
from neo_desktop.models.stages import Stages, Step
from neo_desktop.models.state import Scratch, State
from neo_desktop.models.traced.builder import Builder, Code
from neo_desktop.models.traced.capture import CannotCutError
from neo_desktop.models.traced.cut import Cut, cut
from neo_desktop.models.traced.decoder import TracedDecoder
from neo_desktop.models.traced.graph import exported
from neo_desktop.models.traced.lowered import lowered
from neo_desktop.models.traced.patterns import fused_pieces
from neo_desktop.models.traced.places import NotRowsError
from neo_desktop.models.traced.recurrences import ROW_DIMS
from neo_desktop.models.traced.refusals import cannot_cut
from neo_desktop.models.traced.rows import name_of, width_of
from neo_desktop.models.traced.segments import Segments, segments

logger = logging.getLogger(__name__)
CHECKED_ROWS = 3


class TracedStages(Stages):
    """The stages of a model of `transformers`; see `Stages`.

    Raises:
        ModelError: the model cannot be cut.
    """

    def __init__(self, decoder: TracedDecoder, operators: Operators | None = None) -> None:
        self.decoder = decoder
        self.config = config = decoder.config
        self.attention = specs_of(config, decoder.sinks)
        self.has_head = True
        self._reduce = None
        self._rounds = any(
            isinstance(linear, Quantised | QuantisedOnGPU)
            or (isinstance(linear, OffloadedLinear) and linear.takes_stored)
            for linear in decoder.linears()
        )
        graph = exported(config.source, decoder.dtype, decoder.spec)
        try:
            found = cut(graph, decoder.dtype)
            _check_widths(found, decoder)
        except CannotCutError as error:
            raise cannot_cut(config.source, config, error) from None
        on_cpu = native_operators if decoder.device.type == "cpu" else in_torch
        self._operators = operators or on_cpu
        builder, count = Builder(graph, found, decoder, self._operators), len(found.pieces)
        self._rows = {}  # on a CPU, of the stages that can be lowered
        pieces = self._with_operators(builder, count)
        if pieces is None:
            logger.warning(
                "%s: fused operators compute other numbers than its code: it runs slower without them",
                config.architecture,
            )
            self._rotate = builder.rotation()
            pieces = [builder.piece(index) for index in range(count)]
            self._use(pieces, with_programs=False)
        self._head, self._head_matrix = builder.head()
        self.ends_with_states = any(name_of(node) in ROW_DIMS for node in found.pieces[-1].nodes)
        self._segments: dict[int, Segments] = {}  # by stage index; empty without cuts
        if decoder.has_splits:
            self._segments, self.turn = segments(pieces[1:])
        # Memory of cuts that became too small is kept, because the device may still use it.
        self._rooms: list[tuple[Tensor, Tensor]] = []

    def _use(self, pieces: list[fx.GraphModule], *, with_programs: bool = True) -> None:
        codes: list[Code] = [piece.forward for piece in pieces]
        self._embed, self._pieces = codes[0], codes[1:]
        self._rows.clear()
        if self.decoder.device.type != "cpu" or not with_programs:
            return
        for index, piece in enumerate(pieces[1:]):
            try:
                self._rows[index] = lowered(piece, self.config, self.decoder.dtype)
            except NotRowsError as error:
                logger.debug("stage %d runs operator by operator: %s", index, error)

    @classmethod
    def of(cls, decoder: TracedDecoder, operators: Operators | None = None) -> "TracedStages":
        """Return a decoder's stages, which are cached."""
        if decoder.stages is None:
            decoder.stages = cls(decoder, operators)
        stages: TracedStages = decoder.stages
        return stages

    def _with_operators(self, builder: Builder, count: int) -> list[fx.GraphModule] | None:
        """Use fused operators, and return the pieces; None: they compute other numbers."""
        try:
            pieces, sines = fused_pieces(builder, count, self._operators, self.decoder.dtype)
            self._rotate = builder.rotation(sines)
            self._use(pieces)
            return pieces if self._is_right(builder, pieces) else None
        except Exception as error:  # any exception: the plain pieces use torch alone
            logger.debug("operators fail (%s: %s)", type(error).__name__, error)
            return None

    def _is_right(self, builder: Builder, pieces: list[fx.GraphModule]) -> bool:
        """Check that a piece per kind computes the numbers of the original code."""
        decoder, config, rows = self.decoder, self.config, CHECKED_ROWS
        generator = torch.Generator().manual_seed(0)
        positions = torch.arange(1, rows + 1, device=decoder.device)
        of = config, rows, decoder.dtype, decoder.device
        theirs, ours, program = (State.empty(*of, Scratch.empty(*of)) for _ in range(3))
        plain_rotation, seen = builder.rotation(), set()
        for index, piece in enumerate(pieces[1:]):
            kind = _kind(piece), index in self._rows
            if kind in seen:
                continue
            seen.add(kind)
            memory = torch.randn(rows, config.carried_width, generator=generator)
            attended = torch.randn(rows, config.num_heads, config.head_dim, generator=generator)
            for state in (theirs, ours, program):
                rotate = plain_rotation if state is theirs else self._rotate
                state.residual.copy_(memory)
                state.attention.copy_(attended)
                _rotated(rotate, positions, state.cos[:, 0])
            plain: Code = builder.piece(index + 1).forward
            self._hand_on(plain(*self._given(theirs)), index, theirs)
            self._hand_on(self._pieces[index](*self._given(ours)), index, ours)
            checked = [ours]
            if index in self._rows:
                self.advance(index, program)
                checked.append(program)
            names = ("x",) if index == len(self._pieces) - 1 else ("residual", "qkv")
            for state in checked:
                if not all(self._are_close(getattr(state, name), getattr(theirs, name)) for name in names):
                    return False
        return True

    def _are_close(self, ours: Tensor, theirs: Tensor) -> bool:
        """Return True if two results differ only by rounding.

        Kernels of quantised matrices round their inputs to 8 bits: a last bit may become 1/127, and a stage
        of a hybrid has many layers.
        """
        off = torch.linalg.vector_norm(ours.double() - theirs.double())
        bound = 1e-3 if theirs.dtype is torch.float32 and not self._rounds else 0.03
        return bool(off <= bound * torch.linalg.vector_norm(theirs.double()))

    def embed(self, token_ids: Tensor, positions: Tensor, state: State) -> None:
        values = self._embed(token_ids[None].long(), positions[None].long())
        _keep(values, state.residual)
        self.rotate(positions, state.cos, state.sin)

    def rotate(self, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Compute all values that depend on positions only, into `cos`."""
        _rotated(self._rotate, positions, cos[:, 0])

    def advance(self, index: int, state: State, store: Store | None = None) -> None:
        if index in self._rows:
            self._rows[index].run(state, self._recurrent(state))
        else:
            self._hand_on(self._pieces[index](*self._given(state)), index, state)
        self._store(state, store)

    def _given(self, state: State) -> tuple[Any, ...]:
        """Return the arguments of a stage's code."""
        of_stage = self._recurrent(state), state.scratch.experts
        return state.residual, state.cos[:, 0], state.attention[None], *of_stage

    def _recurrent(self, state: State) -> RecurrentBatch | None:
        """Return the states of recurrent layers; without any, one sequence starts with empty ones."""
        shapes = self.config.state_shapes
        if state.recurrent is None and shapes:
            return fresh_batch(state.rows, shapes, self.decoder.device)
        return state.recurrent

    def _hand_on(self, results: Any, index: int, state: State) -> None:
        """Copy a stage's results to the state."""
        if index == len(self._pieces) - 1:
            state.x.copy_(results[0][0])
            return
        config = self.config
        qkv, carried = results[: 1 + config.kv_parts], results[1 + config.kv_parts :]
        heads = state.qkv.view(len(state.qkv), -1, config.head_dim)
        first = 0
        for each in qkv:
            heads[:, first : first + each.shape[1]].copy_(each[0].transpose(0, 1))
            first += each.shape[1]
        _keep(carried, state.residual)  # last, because keys may be among the values that were carried here

    def _store(self, state: State, store: Store | None) -> None:
        """Write keys and values to a cache; None: no cache, as after the last layer."""
        if store is not None:
            _, keys, values = self.heads(state)
            self._operators.write_rows(keys, values, store.k_cache, store.v_cache, store.slots)

    def steps(self, index: int, state: State, store: Store | None = None) -> Iterator[Step]:
        """Yield the segments of a stage, see `Stages`; results keep their own memory until the last step."""
        if index not in self._segments:
            yield Step(partial(self.advance, index, state, store), None)
            return
        segments, values = self._segments[index], dict[fx.Node, Any]()
        before: fx.Node | None = None

        def begin(taken: fx.Node | None) -> None:
            if taken is None:
                values.clear()
                values.update(segments.values(self._given(state)))
            else:  # the next cut overwrites its memory
                values[taken] = values[taken].clone()

        def run_to(node: fx.Node, taken: fx.Node | None, into: Sequence[Tensor], out: Tensor) -> None:
            begin(taken)
            given = segments.run(values, node)
            for target, value in zip(into, given, strict=False):
                target.copy_(value.reshape(target.shape))
            values[node] = out.view(*given[0].shape[:-1], -1)

        def end(taken: fx.Node | None) -> None:
            begin(taken)
            results = segments.run(values)
            values.clear()
            self._hand_on(results, index, state)
            self._store(state, store)

        for node, (name, part) in segments.cuts.items():
            if isinstance(part, MoE):
                room, hidden = state.scratch.experts, self.config.hidden_size
                assert room is not None  # the model has experts
                x, out = self._room(hidden, hidden, state)
                into = x, room.choice.ids, room.choice.weights
                yield Step(partial(run_to, node, before, into, out), DividedExperts(name, part, x, room, out))
            else:
                x, out = self._room(part.columns, part.rows, state)
                yield Step(partial(run_to, node, before, (x,), out), Product(name, part, x, out))
            before = node
        yield Step(partial(end, before), None)

    def _room(self, columns: int, width: int, state: State) -> tuple[Tensor, Tensor]:
        """Return a cut's input [rows, columns] and output [rows, width], both contiguous.

        All cuts share this memory, because they run one after the other.
        """
        rows = state.rows
        sizes = rows * columns, rows * width
        if not self._rooms or any(len(a) < size for a, size in zip(self._rooms[-1], sizes, strict=True)):
            before = self._rooms[-1] if self._rooms else (state.residual[0, :0], state.residual[0, :0])
            x, out = (
                state.residual.new_empty(max(len(had), 1 << (size - 1).bit_length()))
                for had, size in zip(before, sizes, strict=True)
            )
            self._rooms.append((x, out))
        x, out = self._rooms[-1]
        return x[: sizes[0]].view(rows, columns), out[: sizes[1]].view(rows, width)

    @property
    def offloaded_matrices(self) -> dict[tuple[int, str], OffloadedLinear]:
        return {key: part for key, part in self._cuts() if isinstance(part, OffloadedLinear)}

    @property
    def divided_experts(self) -> dict[tuple[int, str], MoE]:
        return {key: part for key, part in self._cuts() if isinstance(part, MoE)}

    def _cuts(self) -> Iterator[tuple[tuple[int, str], OffloadedLinear | MoE]]:
        for index, stage in self._segments.items():
            yield from (((index, name), part) for name, part in stage.cuts.values())

    def final_norm(self, state: State, out: Tensor) -> None:
        out.copy_(state.x)

    def logits(self, normed: Tensor, out: Tensor) -> Tensor:
        if self._head_matrix is not None:
            return self._head_matrix.multiply(normed, out)
        return out.copy_(self._head(normed[None])[0])  # CUDA graphs need a fixed place


def _kind(piece: fx.GraphModule) -> tuple[str, ...]:
    """Return the names of a piece's operators."""
    modules = dict(piece.named_modules())
    return tuple(
        type(modules[str(node.target)]).__name__ if node.op == "call_module" else name_of(node)
        for node in piece.graph.nodes
        if node.op != "get_attr"
    )


def _check_widths(found: Cut, decoder: TracedDecoder) -> None:
    """Raise CannotCutError if the values between stages exceed the state's memory."""
    carried = max(sum(width_of(node) for node in piece.carried) for piece in found.pieces)
    if carried > decoder.config.carried_width:
        raise CannotCutError("layers pass on more than hidden states")
    if sum(width_of(node) for node in found.rotations) > decoder.config.rotation_width:
        raise CannotCutError("too many values depend on positions")


def _rotated(code: Code, positions: Tensor, memory: Tensor) -> None:
    """Write the position-dependent values of stages side by side to memory [rows, width]."""
    first = 0
    for value in code(positions[None].long()):
        rows = value.reshape(len(positions), -1)
        memory[:, first : first + rows.shape[1]].copy_(rows)
        first += rows.shape[1]


def _keep(values: Any, memory: Tensor) -> None:
    """Write values [1, rows, ..] side by side to memory [rows, width]."""
    if len(values) == 1:
        (value,) = values
        if value.data_ptr() != memory.data_ptr():
            rows = value.reshape(len(memory), -1)
            memory[:, : rows.shape[1]].copy_(rows)
        return
    together = torch.cat([value.reshape(len(memory), -1) for value in values], dim=1)
    memory[:, : together.shape[1]].copy_(together)
