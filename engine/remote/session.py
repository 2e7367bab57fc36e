"""A worker's session with one engine: it stores KV in blocks and attends to it on request.

Only the engine knows the owners of the blocks.
"""

import queue
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from neo_desktop.engine.cuda.copies import HostBuffer
from neo_desktop.engine.kv.device_layer import DeviceLayer
from neo_desktop.engine.kv.host_layer import HostLayer
from neo_desktop.engine.kv.layer import DecodeRows, KVLayer, Rows, block_bytes, rows_shape
from neo_desktop.engine.kv.layout import full_runs
from neo_desktop.engine.remote.shape import AttentionShape
from neo_desktop.engine.remote.wire import Channel, Header, Kind, ProtocolError, bytes_of
from neo_desktop.models.attention import heads_of, specs_of

NUM_TABLES = 4  # block tables to keep: two sub-batches each of this and the previous iteration
NUM_INPUTS = 2  # unanswered messages per connection: the next rows arrive while the worker attends
MAX_ROWS = 1 << 20
CPU = torch.device("cpu")
Work = Callable[[], None]  # executes and answers a message


class Session:
    """One engine's KV and connections.

    Args:
        names: of the engine, and of the session.
        sinks: [layers, heads] fp32; None: the model has none.
        device: stores the KV and attends.
    """

    def __init__(
        self,
        names: tuple[str, str],
        shape: AttentionShape,
        sinks: Tensor | None,
        num_blocks: int,
        device: torch.device = CPU,
    ) -> None:
        self.names = names
        self.shape = shape
        self.num_blocks = num_blocks
        kind: type[KVLayer] = HostLayer if device.type == "cpu" else GpuLayer
        parts = kind.allocate(shape, num_blocks, shape.block_size, shape.kv_dtype, device)
        specs = specs_of(shape, None if sinks is None else list(sinks.to(device)))
        self._layers = [
            kind(tuple(part[index] for part in parts), shape.block_size, spec)
            for index, spec in enumerate(specs)
        ]
        self._channels: set[Channel] = set()
        self._changes = threading.Lock()
        self._is_over = False

    def serve(self, channel: Channel) -> None:
        """Process the messages of a connection until it closes.

        Raises:
            OSError: the connection failed, or the engine violated the protocol.
        """
        with self._changes:
            if self._is_over:
                raise ProtocolError("the session is over")
            self._channels.add(channel)
        _Desk(self, self._layers, channel).serve()

    def end(self) -> None:
        with self._changes:
            self._is_over = True
            for channel in self._channels:
                channel.close()
            self._channels.clear()


class _Desk:
    """One connection: a reader thread receives the next messages while this thread executes earlier ones.

        reader        |rows 0     |rows 1     |                |rows 0, next layer|
        this thread               |attend to 0  |o 0|attend to 1  |o 1|attend to 0 ..

    It answers in order; an error in a message is reported after the answers to earlier messages.
    """

    def __init__(self, session: Session, layers: Sequence[KVLayer], channel: Channel) -> None:
        self._shape = session.shape
        self._layers = layers
        self._channel = channel
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}  # number -> (context lengths, block tables)
        self._outputs = HostBuffer(CPU)
        self._jobs: queue.SimpleQueue[tuple[HostBuffer, Work] | Exception] = queue.SimpleQueue()
        self._inputs: queue.SimpleQueue[HostBuffer | None] = queue.SimpleQueue()  # None: end of input
        for _ in range(NUM_INPUTS):
            self._inputs.put(HostBuffer(CPU))

    def serve(self) -> None:
        """Process messages until the connection closes; raises the errors of `Session.serve`."""
        # Not a daemon, so Python waits for it at exit; the connection is closed by then.
        threading.Thread(target=self._take_in_all, name="receives messages of an engine").start()
        try:
            while True:
                job = self._jobs.get()
                if isinstance(job, Exception):
                    raise job
                inputs, work = job
                work()
                self._inputs.put(inputs)
        finally:
            self._inputs.put(None)

    def _take_in_all(self) -> None:
        try:
            while True:
                header = self._checked(self._channel.header())
                if header.kind == Kind.TABLES:
                    self._keep_tables(header)
                elif (inputs := self._inputs.get()) is not None:
                    self._jobs.put((inputs, self._taken_in(header, inputs)))
                else:
                    return
        except Exception as error:
            self._jobs.put(error)

    def _checked(self, header: Header) -> Header:
        if header.rows > MAX_ROWS or header.width > MAX_ROWS:
            raise ProtocolError(f"{header.rows} rows of {header.width} blocks are too many")
        if header.layer >= len(self._layers):
            raise ProtocolError(f"there is no layer {header.layer}")
        return header

    def _taken_in(self, header: Header, inputs: HostBuffer) -> Work:
        """Receive the payload of a message."""
        if header.kind == Kind.ATTEND:
            return self._attend(header, inputs)
        if header.kind == Kind.STORE:
            return self._store(header, inputs)
        if header.kind == Kind.READ:
            return self._read(header)
        raise ProtocolError(f"message {header.kind} is unknown")

    def _keep_tables(self, header: Header) -> None:
        if header.table >= NUM_TABLES:
            raise ProtocolError(f"there is no room for block table {header.table}")
        lens = torch.empty(header.rows, dtype=torch.int32)
        tables = torch.empty(header.rows, header.width, dtype=torch.int32)
        self._channel.read_into(header, lens, tables)
        # pending attention keeps its own reference to the old tables
        self._tables[header.table] = lens, tables

    def _attend(self, header: Header, inputs: HostBuffer) -> Work:
        shape = self._shape
        if header.table not in self._tables or len(self._tables[header.table][0]) != header.rows:
            raise ProtocolError(f"block table {header.table} is not one of {header.rows} requests")
        lens, tables = self._tables[header.table]
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        qkv = inputs.view((header.rows, heads + shape.kv_parts * kv_heads, shape.head_dim), shape.dtype)
        self._channel.read_into(header, qkv)
        q, k, v = heads_of(qkv, heads, kv_heads)

        def attend() -> None:
            out = self._outputs.view((header.rows, heads, shape.head_dim), shape.dtype)
            self._layers[header.layer].decode(DecodeRows(q, tables, lens, out, k, v))
            self._channel.send(Kind.OUTPUT, bytes_of(out), rows=header.rows)

        return attend

    def _store(self, header: Header, inputs: HostBuffer) -> Work:
        slots, rows = torch.empty(header.rows, dtype=torch.int64), self._rows(inputs, header.rows)
        self._channel.read_into(header, slots, rows)

        def store() -> None:
            self._layers[header.layer].write(rows[0], rows[-1], slots)
            self._channel.send(Kind.STORED)

        return store

    def _read(self, header: Header) -> Work:
        slots = torch.empty(header.rows, dtype=torch.int64)
        self._channel.read_into(header, slots)

        def read() -> None:
            rows = self._rows(self._outputs, header.rows)
            self._layers[header.layer].read(slots, rows)
            self._channel.send(Kind.ROWS, bytes_of(rows), rows=header.rows)

        return read

    def _rows(self, buffer: HostBuffer, count: int) -> Tensor:
        return buffer.view(rows_shape(self._shape, count), self._shape.dtype)


def fitting_blocks(shape: AttentionShape, memory_bytes: int) -> int:
    """Return the number of blocks that fit into `memory_bytes`, in whole runs."""
    bytes_per_block = shape.num_layers * block_bytes(shape, shape.block_size, shape.kv_dtype)
    return full_runs(memory_bytes // bytes_per_block)


class GpuLayer(DeviceLayer):
    """One layer in GPU memory; tensors in arguments and results are in host memory.

    All threads use the GPU's default stream, so their work runs in order.
    """

    __slots__ = ()

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        with _current(self.device):
            super().write(k.to(self.device), v.to(self.device), slots.to(self.device))

    def read(self, slots: Tensor, out: Rows) -> None:
        with _current(self.device):
            rows = torch.empty(out.shape, dtype=out.dtype, device=self.device)
            super().read(slots.to(self.device), rows)
            out.copy_(rows)

    def decode(self, rows: DecodeRows) -> None:
        """Store the new K and V, and attend. `slots` has one slot per request; a context of 0 has none."""
        assert rows.k is not None
        assert rows.v is not None
        last = rows.context_lens.long() - 1
        blocks = rows.block_tables.long().gather(1, (last.clamp(min=0) // self.block_size)[:, None])[:, 0]
        slots = torch.where(last < 0, -1, blocks * self.block_size + last % self.block_size)
        with _current(self.device):
            self.write(rows.k, rows.v, slots)
            q, tables, lens = (x.to(self.device) for x in (rows.q, rows.block_tables, rows.context_lens))
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            super().decode(DecodeRows(q, tables, lens, out))
            rows.out.copy_(out)


def _current(device: torch.device) -> torch.cuda.device:
    """Return a context in which the GPU is the thread's current device; a no-op for other devices."""
    return torch.cuda.device(device if device.type == "cuda" else -1)
