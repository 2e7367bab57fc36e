"""The CPU's part in decode iterations that a GPU runs from beginning to end by itself (see relay.h)."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from neo_desktop.native import _native, default_isa, view_of

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


@dataclass(frozen=True, slots=True)
class RelayBatch:
    """What one sub-batch hands over, in the same memory in every layer; see `paged_attention_decode`."""

    q: Tensor  # [requests, heads, head_dim]
    k: Tensor  # [requests, kv_heads, head_dim], of the newest tokens
    v: Tensor
    out: Tensor  # as q
    block_tables: Tensor  # [requests, max_blocks] int32
    context_lens: Tensor  # [requests] int32
    flags: Tensor  # see `empty_flags`


class RelayStep(NamedTuple):
    """When a layer of a sub-batch was attended to; times are those of `time.perf_counter_ns`."""

    layer: int
    batch: int  # of those that were started
    start_ns: int
    end_ns: int


def empty_flags(num_layers: int, *, pinned: bool) -> Tensor:
    """Make the flags of a sub-batch: [2, num_layers, FLAG_INTS] int32.

    flags[READY, layer, 0] becomes 1 when q, k and v of the layer are there, flags[DONE, layer, 0] when its
    output is; the rest is room between them.
    """
    return torch.zeros(2, num_layers, FLAG_INTS, dtype=torch.int32, pin_memory=pinned)


class Relay:
    """A thread that attends when told so through memory: neither Python nor a system call between two layers.

    During an iteration it looks at the flags without sleeping, on a CPU of its own; between iterations it
    sleeps. Layers are attended to in order; in a layer, the batches in order. One thread makes the calls; any
    may cancel.

    Args:
        layers: all alike but for their windows.
        block_size: tokens of an entry of the block tables.
        scale: multiplies q·k.
        num_threads: 0 means `default_num_threads()`.
        isa: one of `available_isas()`; None means `default_isa()`.

    Raises:
        ValueError: the caches cannot be used.
    """

    def __init__(
        self,
        layers: Sequence[RelayLayer],
        *,
        block_size: int,
        scale: float,
        num_threads: int = 0,
        isa: str | None = None,
    ) -> None:
        self._block_size = block_size
        self._scale = scale
        self._layers = tuple(layers)  # whose memory must stay
        self._batches: tuple[RelayBatch, ...] = ()  # likewise
        views = [
            (
                view_of("k_cache", layer.k_cache),
                view_of("v_cache", layer.v_cache),
                None if layer.k_scale is None else view_of("k_scale", layer.k_scale),
                None if layer.v_scale is None else view_of("v_scale", layer.v_scale),
                layer.window,
            )
            for layer in layers
        ]
        self._relay = _native.Relay(views, num_threads, isa or default_isa())

    def start(self, batches: Sequence[RelayBatch], patience_s: float = 0.0) -> None:
        """Clear the flags and begin an iteration; to be called before whoever raises flags begins.

        Args:
            batches: what is handed over.
            patience_s: when nothing goes on for so long, on either side, the iteration is given up: all flags
                of outputs are raised, and `finish` says where it stood. 0: it never is. Time in which this
                process or its computer did not run does not count.

        Raises:
            ValueError: something in the batches is wrong; nothing was begun.
            RuntimeError: an iteration is under way, or the relay is closed.
        """
        views = [
            (
                (
                    view_of("q", batch.q),
                    view_of("out", batch.out),
                    view_of("block_tables", batch.block_tables),
                    view_of("context_lens", batch.context_lens),
                    view_of("k", batch.k),
                    view_of("v", batch.v),
                    self._block_size,
                    self._scale,
                ),
                view_of("flags", batch.flags),
            )
            for batch in batches
        ]
        self._relay.start(views, patience_s)
        self._batches = tuple(batches)

    def finish(self) -> list[RelayStep]:
        """Block until the iteration has ended; return what was done, in order.

        Raises:
            RelayStalledError: it was given up. A step that does not end may still be under way, so that no
                other iteration can begin.
            RuntimeError: the iteration was cancelled, or a step failed.
        """
        return [RelayStep(*step) for step in self._relay.finish()]

    def cancel(self) -> None:
        """End the iteration early: all flags of outputs are raised. Nothing happens if there is none."""
        self._relay.cancel()

    def close(self) -> bool:
        """Cancel what is under way and end the thread; called again, and of a relay that is dropped, too.

        Returns:
            Whether the thread has ended. In a step that does not end it is left behind after some seconds,
            with the memory that it uses: it may still write there.
        """
        has_ended = self._relay.close()
        if not has_ended:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((self._layers, self._batches)))  # for ever
        return has_ended

    def __del__(self) -> None:
        if hasattr(self, "_relay"):
            self.close()
