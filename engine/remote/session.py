"""What a worker does for one engine: it keeps KV in blocks, and attends to it, as it is told.

Which block holds whose KV is known to the engine alone.
"""

import threading

import torch
from torch import Tensor

from neo_desktop.engine.kv.host_layer import HostLayer
from neo_desktop.engine.kv.layer import block_bytes
from neo_desktop.engine.kv.layout import BLOCKS_PER_RUN
from neo_desktop.engine.kv.transfer import HostBuffer
from neo_desktop.engine.remote.shape import AttentionShape
from neo_desktop.engine.remote.wire import Channel, Header, Kind, ProtocolError, bytes_of

NUM_TABLES = 4  # block tables that are kept: of two sub-batches, of this iteration and of the last one
MAX_ROWS = 1 << 20
CPU = torch.device("cpu")


class Session:
    """The KV of one engine, and all connections to it.

    Args:
        names: of the engine, and of the session.
        shape: of the model's attention.
        sinks: [layers, heads] fp32; None: there are none.
        num_blocks: in each layer.
    """

    def __init__(
        self, names: tuple[str, str], shape: AttentionShape, sinks: Tensor | None, num_blocks: int
    ) -> None:
        self.names = names
        self.shape = shape
        self.num_blocks = num_blocks
        parts = HostLayer.allocate(shape, num_blocks, shape.block_size, shape.kv_dtype, CPU)
        self._layers = [
            HostLayer(
                tuple(part[index] for part in parts),
                shape.block_size,
                None if sinks is None else sinks[index],
            )
            for index in range(shape.num_layers)
        ]
        self._channels: set[Channel] = set()
        self._changes = threading.Lock()
        self._is_over = False

    def serve(self, channel: Channel) -> None:
        """Do what comes over a connection, until it ends.

        Raises:
            OSError: the connection failed, or said what it must not say.
        """
        with self._changes:
            if self._is_over:
                raise ProtocolError("the session is over")
            self._channels.add(channel)
        desk = _Desk(self, self._layers, channel)
        while True:
            desk.carry_out(channel.header())

    def end(self) -> None:
        """End all connections; what was kept is lost."""
        with self._changes:
            self._is_over = True
            for channel in self._channels:
                channel.close()
            self._channels.clear()


class _Desk:
    """One connection's memory, and what it asks for."""

    def __init__(self, session: Session, layers: list[HostLayer], channel: Channel) -> None:
        self._shape = session.shape
        self._layers = layers
        self._channel = channel
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}  # context lengths, block tables
        self._inputs, self._outputs = HostBuffer(CPU), HostBuffer(CPU)

    def carry_out(self, header: Header) -> None:
        """Take a message in, and answer."""
        if header.rows > MAX_ROWS or header.width > MAX_ROWS:
            raise ProtocolError(f"{header.rows} rows of {header.width} blocks are too many")
        if header.layer >= len(self._layers):
            raise ProtocolError(f"there is no layer {header.layer}")
        if header.kind == Kind.TABLES:
            self._keep_tables(header)
        elif header.kind == Kind.ATTEND:
            self._attend(header)
        elif header.kind == Kind.STORE:
            self._store(header)
        elif header.kind == Kind.READ:
            self._read(header)
        elif header.kind == Kind.PING:
            self._channel.read_into(header)
            self._channel.send(Kind.PONG)
        else:
            raise ProtocolError(f"message {header.kind} is unknown")

    def _keep_tables(self, header: Header) -> None:
        if header.table >= NUM_TABLES:
            raise ProtocolError(f"there is no room for block table {header.table}")
        lens = torch.empty(header.rows, dtype=torch.int32)
        tables = torch.empty(header.rows, header.width, dtype=torch.int32)
        self._channel.read_into(header, lens, tables)
        self._tables[header.table] = lens, tables

    def _attend(self, header: Header) -> None:
        shape = self._shape
        if header.table not in self._tables or len(self._tables[header.table][0]) != header.rows:
            raise ProtocolError(f"block table {header.table} is not one of {header.rows} requests")
        lens, tables = self._tables[header.table]
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        qkv = self._inputs.view((header.rows, heads + 2 * kv_heads, shape.head_dim), shape.dtype)
        out = self._outputs.view((header.rows, heads, shape.head_dim), shape.dtype)
        self._channel.read_into(header, qkv)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        window = shape.windows[header.layer]
        self._layers[header.layer].decode(q, k, v, None, tables, lens, out, shape.scale, window)
        self._channel.send(Kind.OUTPUT, bytes_of(out), rows=header.rows)

    def _store(self, header: Header) -> None:
        slots, rows = torch.empty(header.rows, dtype=torch.int64), self._rows(self._inputs, header.rows)
        self._channel.read_into(header, slots, rows)
        self._layers[header.layer].write(rows[0], rows[1], slots)
        self._channel.send(Kind.STORED)

    def _read(self, header: Header) -> None:
        slots, rows = torch.empty(header.rows, dtype=torch.int64), self._rows(self._outputs, header.rows)
        self._channel.read_into(header, slots)
        self._layers[header.layer].read(slots, rows)
        self._channel.send(Kind.ROWS, bytes_of(rows), rows=header.rows)

    def _rows(self, buffer: HostBuffer, count: int) -> Tensor:
        return buffer.view((2, count, self._shape.num_kv_heads, self._shape.head_dim), self._shape.dtype)


def fitting_blocks(shape: AttentionShape, memory_bytes: int) -> int:
    """Return how many blocks fit into so much memory, in whole runs."""
    of_block = shape.num_layers * block_bytes(shape, shape.block_size, shape.kv_dtype)
    return memory_bytes // (of_block * BLOCKS_PER_RUN) * BLOCKS_PER_RUN
