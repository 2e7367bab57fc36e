"""The CPU's work in an iteration (see host_task.h), and relays that run it without Python (see relay.h)."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from neo_desktop.native import Matrix, PackedExperts, _native, default_isa, view_of
from neo_desktop.native.packed import seen_matrix

FLAG_INTS = 16  # a flag has a cache line to itself
READY, DONE = 0, 1  # kinds of flags

# An iteration without progress for longer than the timeout; the message names the step.
RelayStalledError = _native.RelayStalledError


def empty_flags(num_turns: int, *, pinned: bool) -> Tensor:
    """Allocate the flags of a task: [2, num_turns, FLAG_INTS] int32.

    flags[READY, turn, 0] becomes 1 when the device has done its part: q, k and v are in host memory.
    flags[DONE, turn, 0] becomes 1 when the task has written the output. The rest is padding.
    """
    return torch.zeros(2, num_turns, FLAG_INTS, dtype=torch.int32, pin_memory=pinned)


class HostTask:
    """A kind of work of the CPU in an iteration, with a step per layer, or per turn.

    A turn is the work between the attention of two layers, so there is one turn more than layers. Turn t ends
    layer t - 1 and begins layer t.

    The functions of this module make tasks, and raise ValueError for invalid arguments. A task keeps the
    memory of its arguments alive.

    Args:
        task: Made by `_native`.
        flags: See `empty_flags`.
        memory: Owners of the memory that the task uses.
    """

    def __init__(self, task: _native.HostTask, flags: Tensor, memory: object) -> None:
        self.native = task
        self.flags = flags
        self._memory = memory

    def check(self) -> None:
        """Raise ValueError if block tables or context lengths, which may have changed, are invalid."""
        self.native.check()

    def run(self, turn: int) -> None:
        """Run the step of a turn in which the task takes part, on this thread and the pool's."""
        self.native.run(turn, 0, default_isa())


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's KV in host memory; see `paged_attention_decode`."""

    k_cache: Tensor
    v_cache: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    window: int  # 0: all
    sinks: Tensor | None = None


class HostCaches:
    """A model's KV in host memory.

    Args:
        layers: With the same shapes; windows and sinks may differ.
        block_size: Tokens per entry of the block tables.
        scale: Multiplies q·k.
        softcap: Scores s become softcap * tanh(s / softcap); 0: no cap.

    Raises:
        ValueError: The caches are invalid.
    """

    def __init__(
        self, layers: Sequence[LayerCache], *, block_size: int = 1, scale: float = 1.0, softcap: float = 0.0
    ) -> None:
        self._constants = block_size, scale, softcap
        self._layers = tuple(layers)  # keeps their memory alive
        self._native = _native.HostCaches(
            [
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
        )

    def decode_task(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        flags: Tensor,
        index: int = 0,
    ) -> HostTask:
        """Make the attention of a sub-batch's decodes, with the same offload buffers in every layer.

        Or of async decodes, each in its own layer: then all tensors but the flags have a leading dimension
        of layers. See `paged_attention_decode`.

        Args:
            q: [requests, heads, head_dim]; `out` has the same shape.
            k: [requests, kv_heads, head_dim], of the newest tokens; `v` has the same shape.
            block_tables: [requests, max_blocks] int32
            context_lens: [requests] int32
            index: Of the sub-batch, for messages.
        """
        decode = (
            view_of("q", q),
            view_of("out", out),
            view_of("block_tables", block_tables),
            view_of("context_lens", context_lens),
            view_of("k", k),
            view_of("v", v),
            *self._constants,
        )
        task = _native.decode_task(self._native, decode, view_of("flags", flags), index)
        return HostTask(task, flags, (self, q, k, v, out, block_tables, context_lens))

    def rows_task(
        self,
        what: str,
        slots: Tensor,
        buffers: Sequence[Tensor],
        flags: Tensor,
        *,
        to_host: bool,
        is_behind: bool = False,
    ) -> HostTask:
        """Make a transfer of rows between slots and the device, through two alternating buffers.

        To the host: READY means that a layer's rows are in its buffer, DONE that they are in the cache, and
        the buffer may be filled again. To the device: READY means that a layer's buffer may be filled, DONE
        that the rows are in it. Layers 0 and 1 fill their buffers at once and ignore READY.

        Args:
            what: Name for messages: "a prompt's KV".
            slots: [n] int64, in every layer's cache; distinct if to the host.
            buffers: Of even and odd layers: [2, n, kv_heads, head_dim], K and V; or K alone, if it is also V.
            is_behind: True: a layer's step follows the next layer's steps of other tasks.
        """
        even, odd = ((view_of("k", each[0]), view_of("v", each[-1])) for each in buffers)
        seen = view_of("slots", slots), even, odd, view_of("flags", flags)
        task = _native.rows_task(self._native, what, to_host, is_behind, *seen)
        return HostTask(task, flags, (self, slots, buffers))


def matmul_task(
    what: str,
    matrices: Sequence[Matrix | None],
    x: Tensor,
    out: Tensor,
    flags: Tensor,
    *,
    lag: int,
    owners: object = None,
    index: int = 0,
) -> HostTask:
    """Make a matmul per turn, with the same memory for input and output; see `native.packed_linear`.

    Args:
        what: Name of the matrices, for messages: "gate_up".
        matrices: Per turn; None: the turn does nothing and ignores its flags.
        x: [n, columns]
        out: [elements]: starts with a turn's result, [n, rows of its matrix].
        lag: Turn t has the matrix of layer t - lag; 0 or 1.
        owners: Of the matrices' memory.
        index: Of the sub-batch, for messages.
    """
    seen = [None if matrix is None else seen_matrix(matrix) for matrix in matrices]
    tensors = view_of("x", x), view_of("out", out), view_of("flags", flags)
    return HostTask(_native.matmul_task(what, lag, seen, *tensors, index), flags, (owners, matrices, x, out))


def experts_task(
    experts: Sequence[PackedExperts | None],
    tensors: Sequence[Tensor],
    flags: Tensor,
    *,
    owners: object = None,
    index: int = 0,
) -> HostTask:
    """Make the experts of every turn, with the same memory for input and output.

    Args:
        experts: Per turn; turn t has the experts of layer t - 1. None: the turn does nothing.
        tensors: x, ids, weights, gate_up, gated, products and out of `native.multiply_experts`. If scratch
            tensors have fewer rows, it computes in parts of that size.
        owners: Of the experts' memory.
        index: Of the sub-batch, for messages.
    """
    names = ("x", "ids", "weights", "gate_up", "gated", "products", "out")
    seen = [view_of(name, tensor) for name, tensor in zip(names, tensors, strict=True)]
    task = _native.experts_task(experts, seen, view_of("flags", flags), index)
    return HostTask(task, flags, (owners, experts, tensors))


def copy_task(what: str, sources: Sequence[Tensor], buffers: Sequence[Tensor], flags: Tensor) -> HostTask:
    """Make copies of pieces of host memory, one per turn, to buffers that the device reads.

    READY means that the turn's buffer may be filled, DONE that it is filled. The first turns, one per buffer,
    fill it at once and ignore READY.

    Args:
        what: Name for messages: "weights".
        sources: [bytes], per turn.
        buffers: [bytes], used in turn.
        flags: See `empty_flags`, for these turns or more.
    """
    pieces, rooms = ([(each.data_ptr(), each.nbytes) for each in given] for given in (sources, buffers))
    task = _native.copy_task(what, pieces, rooms, view_of("flags", flags))
    return HostTask(task, flags, (sources, buffers))


class RelayStep(NamedTuple):
    """Record of a task's step; times of `time.perf_counter_ns`."""

    turn: int  # or layer
    task: int  # index in `start`'s tasks
    start_ns: int
    end_ns: int


class Relay:
    """A thread that runs tasks when flags in memory say so, without Python.

    Tasks run in the given order, turn by turn; steps that are behind follow the next layer's others:

        ahead 0 | ahead 1 | behind 0 | ahead 2 | behind 1 | ..

    With attention or matmuls among them, the thread polls the flags without sleeping, on its own CPU, and the
    thread pool's workers stay awake. Transfers and copies alone are not urgent: the thread then sleeps
    between polls, and moves rows in small pieces, so that the pool's threads are soon free for another
    relay's attention. It copies bytes itself. Between iterations it sleeps. One thread makes the calls; any
    thread may cancel.

    Args:
        num_threads: 0 means `default_num_threads()`.
        isa: one of `available_isas()`; None means `default_isa()`.
    """

    def __init__(self, *, num_threads: int = 0, isa: str | None = None) -> None:
        self._tasks: tuple[HostTask, ...] = ()  # keeps their memory alive
        self._relay = _native.Relay(num_threads, isa or default_isa())

    def start(self, tasks: Sequence[HostTask], timeout_s: float = 0.0) -> None:
        """Clear the flags and start an iteration; call it before the device raises flags.

        Args:
            timeout_s: without progress on either side for this time, the iteration fails: the relay raises
                all flags that the device may wait for, and `finish` names the step. 0: no timeout. Time in
                which this process or its computer was suspended does not count.

        Raises:
            RuntimeError: an iteration is running, or the relay is closed.
        """
        self._relay.start([task.native for task in tasks], timeout_s)
        self._tasks = tuple(tasks)

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
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._tasks))  # forever
        return has_ended

    def __del__(self) -> None:
        if hasattr(self, "_relay"):
            self.close()
