"""The CPU's part in iterations that a GPU runs from beginning to end by itself (see relay.h)."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from neo_desktop.native import Matrix, PackedExperts, _native, default_isa, view_of

FLAG_INTS = 16  # a flag has a cache line to itself
READY, DONE = 0, 1  # kinds of flags

# An iteration in which nothing went on for longer than it may; the message names where it stood.
RelayStalledError = _native.RelayStalledError


@dataclass(frozen=True, slots=True)
class RelayLayer:
    """One layer's KV in host memory; see `paged_attention_decode`."""

    k_cache: Tensor
    v_cache: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    window: int  # 0: all
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RelayBatch:
    """What one sub-batch hands over, in the same memory in every layer; see `paged_attention_decode`.

    Or decodes of which each is in a layer of its own: then all tensors but the flags have a dimension of
    layers before the others.
    """

    q: Tensor  # [requests, heads, head_dim]
    k: Tensor  # [requests, kv_heads, head_dim], of the newest tokens
    v: Tensor
    out: Tensor  # as q
    block_tables: Tensor  # [requests, max_blocks] int32
    context_lens: Tensor  # [requests] int32
    flags: Tensor  # see `empty_flags`
    index: int = 0  # of the sub-batch, for people


@dataclass(frozen=True, slots=True)
class RelayTransfer:
    """Rows that cross over in every layer between slots of host memory and the device.

    They go through two buffers that take turns.

    To the host: flags[READY, layer, 0] says that the layer's rows are in its buffer, flags[DONE, layer, 0]
    that they are in the cache, and the buffer may be filled again.

    To the device: flags[READY, layer, 0] says that the layer's buffer may be filled, flags[DONE, layer, 0]
    that the rows are in it. In layers 0 and 1 it may be filled from the beginning: READY is not looked at.
    """

    what: str  # crosses over, for people: "a prompt's KV"
    to_host: bool
    is_behind: bool  # done after the next layer's transfers that are not
    slots: Tensor  # [n] int64, of every layer's cache in host memory; to the host: all different
    buffers: tuple[Tensor, Tensor]  # of even and odd layers: [2, n, kv_heads, head_dim], K and V
    flags: Tensor  # see `empty_flags`


@dataclass(frozen=True, slots=True)
class RelayProduct:
    """A product in every turn between the attention of two layers; see `native.packed_linear`.

    There is one turn more than there are layers: turn t has what follows the attention of layer t - 1, and
    what precedes that of layer t. All turns share x and out.
    """

    what: str  # the matrices are, for people: "gate_up"
    lag: int  # in turn t it is of layer t - lag: 0 or 1
    # [layers + 1]; None: nothing is done in that turn, and its flags are not looked at.
    matrices: Sequence[Matrix | None]
    x: Tensor  # [n, columns]
    out: Tensor  # [elements]: see `out_of`
    flags: Tensor  # see `empty_flags`: of layers + 1
    owners: object = None  # of the matrices' memory
    index: int = 0  # of the sub-batch, for people

    def out_of(self, turn: int) -> Tensor:
        """Return where the product of a turn lies, [n, rows of its matrix]: at the beginning of `out`."""
        matrix = self.matrices[turn]
        rows = 0 if matrix is None else sum(part[3] for part in matrix[0])
        return self.out[: len(self.x) * rows].view(len(self.x), rows)


@dataclass(frozen=True, slots=True)
class RelayExperts:
    """A layer's experts in every turn, see `RelayProduct` and `native.multiply_experts`.

    gate_up, gated and products may be for fewer rows: then so many are computed at a time.
    """

    # [layers + 1], in turn t of layer t - 1; None: nothing is done in that turn.
    experts: Sequence[PackedExperts | None]
    x: Tensor  # [n, hidden]
    ids: Tensor  # [n, k] int32
    weights: Tensor  # [n, k] fp32
    gate_up: Tensor  # [rows * k, 2 * intermediate]
    gated: Tensor  # [rows * k, intermediate]
    products: Tensor  # [rows * k, hidden]
    out: Tensor  # [n, hidden]
    flags: Tensor  # see `empty_flags`: of layers + 1
    owners: object = None  # of the experts' memory
    index: int = 0  # of the sub-batch, for people


@dataclass(frozen=True, slots=True)
class RelayCopies:
    """Pieces of host memory that the device does not read where they lie: it takes them from buffers.

    flags[READY, turn, 0] says that the turn's buffer may be filled, flags[DONE, turn, 0] that it has been. In
    the first turns, one for each buffer, it may be filled from the beginning: READY is not looked at.
    """

    what: str  # is copied, for people: "weights"
    sources: Sequence[Tensor]  # [bytes], of every turn: any number that the relay has layers for
    buffers: Sequence[Tensor]  # [bytes], which take turns
    flags: Tensor  # see `empty_flags`: of as many turns, or more


RelayItem: TypeAlias = RelayBatch | RelayTransfer | RelayProduct | RelayExperts | RelayCopies


class RelayStep(NamedTuple):
    """When an item of a layer was done; times are those of `time.perf_counter_ns`."""

    layer: int  # of products: the turn
    item: int  # of those that were started
    start_ns: int
    end_ns: int


def empty_flags(num_layers: int, *, pinned: bool) -> Tensor:
    """Make the flags of an item: [2, num_layers, FLAG_INTS] int32.

    flags[READY, layer, 0] becomes 1 when the device has done its part (of a sub-batch: q, k and v of the
    layer are there), flags[DONE, layer, 0] when the relay has (the output is there); the rest is room between
    them.
    """
    return torch.zeros(2, num_layers, FLAG_INTS, dtype=torch.int32, pin_memory=pinned)


class Relay:
    """A thread that attends, multiplies and moves KV when told so through memory, without Python in between.

    Items are done in the order in which they are given, layer by layer, or turn by turn; those that are
    behind come after the next layer's others:

        ahead 0 | ahead 1 | behind 0 | ahead 2 | behind 1 | ..

    With attention or products among them the thread looks at the flags without sleeping, on a CPU of its own,
    and the thread pool's workers stay awake. Transfers and copies alone have time: it looks at their flags
    with short rests, and moves rows in small pieces, so that the pool's threads are soon free for another
    relay's attention; bytes it copies by itself. Between iterations it sleeps. One thread makes the calls;
    any may cancel.

    Args:
        layers: all alike but for their windows and the numbers of their sinks.
        block_size: tokens of an entry of the block tables.
        scale: multiplies q·k.
        softcap: scores s become softcap * tanh(s / softcap); 0: they stay as they are.
        num_layers: of a relay for products alone, or for copies alone, which is given no layers.
        num_threads: 0 means `default_num_threads()`.
        isa: one of `available_isas()`; None means `default_isa()`.

    Raises:
        ValueError: the caches cannot be used.
    """

    def __init__(
        self,
        layers: Sequence[RelayLayer],
        *,
        block_size: int = 1,
        scale: float = 1.0,
        softcap: float = 0.0,
        num_layers: int = 0,
        num_threads: int = 0,
        isa: str | None = None,
    ) -> None:
        self._block_size = block_size
        self._scale = scale
        self._softcap = softcap
        self._layers = tuple(layers)  # whose memory must stay
        self._items: tuple[RelayItem, ...] = ()  # likewise
        views = [
            (
                view_of("k_cache", layer.k_cache),
                view_of("v_cache", layer.v_cache),
                None if layer.k_scale is None else view_of("k_scale", layer.k_scale),
                None if layer.v_scale is None else view_of("v_scale", layer.v_scale),
                layer.window,
                None if layer.sinks is None else view_of("sinks", layer.sinks),
            )
            for layer in layers
        ]
        self._relay = _native.Relay(views, num_layers, num_threads, isa or default_isa())

    def start(self, items: Sequence[RelayItem], timeout_s: float = 0.0) -> None:
        """Clear the flags and begin an iteration; to be called before the device begins to raise flags.

        Args:
            items: what is done in every layer.
            timeout_s: when nothing goes on for so long, on either side, the iteration is given up: all flags
                that the device may wait for are raised, and `finish` says where it stood. 0: it never is.
                Time in which this process or its computer did not run does not count.

        Raises:
            ValueError: something in the items is wrong; nothing was begun.
            RuntimeError: an iteration is under way, or the relay is closed.
        """
        self._relay.start([self._seen(item) for item in items], timeout_s)
        self._items = tuple(items)

    def finish(self) -> list[RelayStep]:
        """Block until the iteration has ended; return what was done, in order.

        Raises:
            RelayStalledError: it was given up. A step that does not end may still be under way, so that no
                other iteration can begin.
            RuntimeError: the iteration was cancelled, or a step failed.
        """
        return [RelayStep(*step) for step in self._relay.finish()]

    def cancel(self) -> None:
        """End the iteration early: all flags that the device may wait for are raised.

        Nothing happens if there is none.
        """
        self._relay.cancel()

    def close(self) -> bool:
        """Cancel what is under way and end the thread; called again, and of a relay that is dropped, too.

        Returns:
            Whether the thread has ended. In a step that does not end it is left behind after some seconds,
            with the memory that it uses: it may still write there.
        """
        has_ended = self._relay.close()
        if not has_ended:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((self._layers, self._items)))  # for ever
        return has_ended

    def __del__(self) -> None:
        if hasattr(self, "_relay"):
            self.close()

    def _seen(
        self, item: RelayItem
    ) -> "_native.Batch | _native.Transfer | _native.Product | _native.ExpertsInTurns | _native.Copies":
        match item:
            case RelayBatch():
                return self._batch(item)
            case RelayTransfer():
                return _transfer(item)
            case RelayProduct():
                return _product(item)
            case RelayExperts():
                return _experts(item)
            case RelayCopies():
                return _copies(item)

    def _batch(self, batch: RelayBatch) -> "_native.Batch":
        decode = (
            view_of("q", batch.q),
            view_of("out", batch.out),
            view_of("block_tables", batch.block_tables),
            view_of("context_lens", batch.context_lens),
            view_of("k", batch.k),
            view_of("v", batch.v),
            self._block_size,
            self._scale,
            self._softcap,
        )
        return decode, view_of("flags", batch.flags), batch.index


def _transfer(item: RelayTransfer) -> "_native.Transfer":
    slots, flags = view_of("slots", item.slots), view_of("flags", item.flags)
    even, odd = ((view_of("k", k), view_of("v", v)) for k, v in item.buffers)
    return item.what, item.to_host, item.is_behind, slots, even, odd, flags


def _product(item: RelayProduct) -> "_native.Product":
    matrices = [
        None if matrix is None else (matrix[0], None if matrix[1] is None else view_of("bias", matrix[1]))
        for matrix in item.matrices
    ]
    x, out, flags = view_of("x", item.x), view_of("out", item.out), view_of("flags", item.flags)
    return item.what, item.lag, matrices, x, out, flags, item.index


def _copies(item: RelayCopies) -> "_native.Copies":
    sources, buffers = (
        [(each.data_ptr(), each.nbytes) for each in tensors] for tensors in (item.sources, item.buffers)
    )
    return item.what, sources, buffers, view_of("flags", item.flags)


def _experts(item: RelayExperts) -> "_native.ExpertsInTurns":
    names = ("x", "ids", "weights", "gate_up", "gated", "products", "out")
    tensors = [view_of(name, getattr(item, name)) for name in names]
    return item.experts, tensors, view_of("flags", item.flags), item.index
