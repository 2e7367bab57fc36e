"""The CPU's part of iterations that run on a GPU as one CUDA graph (see relay.h)."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from neo_desktop.native import Matrix, PackedExperts, _native, default_isa, view_of

FLAG_INTS = 16  # a flag has a cache line to itself
READY, DONE = 0, 1  # kinds of flags

# An iteration without progress for longer than the timeout; the message names the step.
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
    """A sub-batch's offload buffers, the same memory in every layer; see `paged_attention_decode`.

    Or async decodes, each in its own layer: then all tensors but the flags have a leading dimension of
    layers.
    """

    q: Tensor  # [requests, heads, head_dim]
    k: Tensor  # [requests, kv_heads, head_dim], of the newest tokens
    v: Tensor
    out: Tensor  # as q
    block_tables: Tensor  # [requests, max_blocks] int32
    context_lens: Tensor  # [requests] int32
    flags: Tensor  # see `empty_flags`
    index: int = 0  # of the sub-batch, for messages


@dataclass(frozen=True, slots=True)
class RelayTransfer:
    """Rows that move between slots of host memory and the device in every layer, through two alternating
    buffers.

    To the host: flags[READY, layer, 0] means that the layer's rows are in its buffer, flags[DONE, layer, 0]
    that they are in the cache, and the buffer may be filled again.

    To the device: flags[READY, layer, 0] means that the layer's buffer may be filled, flags[DONE, layer, 0]
    that the rows are in it. Layers 0 and 1 fill their buffers at once and ignore READY.
    """

    what: str  # name for messages: "a prompt's KV"
    to_host: bool
    is_behind: bool  # done after the next layer's transfers that are ahead
    slots: Tensor  # [n] int64, in every layer's host cache; distinct if to the host
    buffers: tuple[Tensor, Tensor]  # of even and odd layers: [2, n, kv_heads, head_dim], K and V
    flags: Tensor  # see `empty_flags`


@dataclass(frozen=True, slots=True)
class RelayProduct:
    """A matmul in every turn between the attention of two layers; see `native.packed_linear`.

    The number of turns is the number of layers plus one: turn t has the matmuls of layer t - 1 after its
    attention, and those of layer t before its attention. All turns share x and out.
    """

    what: str  # name of the matrices, for messages: "gate_up"
    lag: int  # turn t has the matrix of layer t - lag; 0 or 1
    # [layers + 1]; None: the turn does nothing and ignores its flags.
    matrices: Sequence[Matrix | None]
    x: Tensor  # [n, columns]
    out: Tensor  # [elements]: see `out_of`
    flags: Tensor  # see `empty_flags`, for layers + 1
    owners: object = None  # of the matrices' memory
    index: int = 0  # of the sub-batch, for messages

    def out_of(self, turn: int) -> Tensor:
        """Return the result of a turn, [n, rows of its matrix]: a view of the start of `out`."""
        matrix = self.matrices[turn]
        rows = 0 if matrix is None else sum(part[3] for part in matrix[0])
        return self.out[: len(self.x) * rows].view(len(self.x), rows)


@dataclass(frozen=True, slots=True)
class RelayExperts:
    """A layer's experts in every turn, see `RelayProduct` and `native.multiply_experts`.

    gate_up, gated and products may have fewer rows: it then computes in parts of that size.
    """

    # [layers + 1]; turn t has the experts of layer t - 1. None: the turn does nothing.
    experts: Sequence[PackedExperts | None]
    x: Tensor  # [n, hidden]
    ids: Tensor  # [n, k] int32
    weights: Tensor  # [n, k] fp32
    gate_up: Tensor  # [rows * k, 2 * intermediate]
    gated: Tensor  # [rows * k, intermediate]
    products: Tensor  # [rows * k, hidden]
    out: Tensor  # [n, hidden]
    flags: Tensor  # see `empty_flags`, for layers + 1
    owners: object = None  # of the experts' memory
    index: int = 0  # of the sub-batch, for messages


@dataclass(frozen=True, slots=True)
class RelayCopies:
    """Pieces of host memory that the device reads from alternating buffers, not in place.

    flags[READY, turn, 0] means that the turn's buffer may be filled, flags[DONE, turn, 0] that it is filled.
    The first turns, one per buffer, fill it at once and ignore READY.
    """

    what: str  # name for messages: "weights"
    sources: Sequence[Tensor]  # [bytes], per turn; at most as many as layers
    buffers: Sequence[Tensor]  # [bytes], used in turn
    flags: Tensor  # see `empty_flags`, for these turns or more


RelayItem: TypeAlias = RelayBatch | RelayTransfer | RelayProduct | RelayExperts | RelayCopies


class RelayStep(NamedTuple):
    """Record of an item's work in one layer; times of `time.perf_counter_ns`."""

    layer: int  # for matmuls: the turn
    item: int  # index in `start`'s items
    start_ns: int
    end_ns: int


def empty_flags(num_layers: int, *, pinned: bool) -> Tensor:
    """Allocate the flags of an item: [2, num_layers, FLAG_INTS] int32.

    flags[READY, layer, 0] becomes 1 when the device has done its part (for a sub-batch: q, k and v of the
    layer are ready), flags[DONE, layer, 0] when the relay has (the output is ready). The rest is padding.
    """
    return torch.zeros(2, num_layers, FLAG_INTS, dtype=torch.int32, pin_memory=pinned)


class Relay:
    """A thread that attends, multiplies and moves KV when flags in memory say so, without Python.

    Items run in the given order, layer by layer or turn by turn; items behind run after the next layer's
    others:

        ahead 0 | ahead 1 | behind 0 | ahead 2 | behind 1 | ..

    With attention or matmuls among them, the thread polls the flags without sleeping, on its own CPU, and the
    thread pool's workers stay awake. Transfers and copies alone are not urgent: the thread then sleeps
    between polls, and moves rows in small pieces, so that the pool's threads are soon free for another
    relay's attention. It copies bytes itself. Between iterations it sleeps. One thread makes the calls; any
    thread may cancel.

    Args:
        layers: with the same shapes; windows and sinks may differ.
        block_size: tokens per entry of the block tables.
        scale: multiplies q·k.
        softcap: scores s become softcap * tanh(s / softcap); 0: no cap.
        num_layers: of a relay without `layers`, for matmuls alone, or for copies alone.
        num_threads: 0 means `default_num_threads()`.
        isa: one of `available_isas()`; None means `default_isa()`.

    Raises:
        ValueError: the caches are invalid.
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
        self._layers = tuple(layers)  # keeps their memory alive
        self._items: tuple[RelayItem, ...] = ()  # the same
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
        """Clear the flags and start an iteration; call it before the device raises flags.

        Args:
            items: work of every layer.
            timeout_s: without progress on either side for this time, the iteration fails: the relay raises
                all flags that the device may wait for, and `finish` names the step. 0: no timeout. Time in
                which this process or its computer was suspended does not count.

        Raises:
            ValueError: an item is invalid; nothing was started.
            RuntimeError: an iteration is running, or the relay is closed.
        """
        self._relay.start([self._seen(item) for item in items], timeout_s)
        self._items = tuple(items)

    def finish(self) -> list[RelayStep]:
        """Block until the iteration has ended; return its steps, in order.

        Raises:
            RelayStalledError: it timed out. A stuck step may still be running, so that no other iteration can
                start.
            RuntimeError: the iteration was cancelled, or a step failed.
        """
        return [RelayStep(*step) for step in self._relay.finish()]

    def cancel(self) -> None:
        """End the iteration early, if one is running: raise all flags that the device may wait for."""
        self._relay.cancel()

    def close(self) -> bool:
        """Cancel a running iteration and end the thread; may be called again. Garbage collection also calls
        it.

        Returns:
            True if the thread has ended. A thread stuck in a step is abandoned after some seconds, with the
            memory that it uses: it may still write there.
        """
        has_ended = self._relay.close()
        if not has_ended:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((self._layers, self._items)))  # forever
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
