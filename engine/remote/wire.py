"""The protocol between engine and worker: messages of a fixed header and raw bytes, little-endian.

    engine                              worker
    SET_UP   JSON: shapes; sinks   →
                                   ←    READY     JSON: number of blocks
    TABLES   context lens, tables  →              once per iteration for all layers; no answer
    ATTEND   q, k, v of a layer    →
                                   ←    OUTPUT    the attention's output
    STORE    slots, k and v        →
                                   ←    STORED
    READ     slots                 →
                                   ←    ROWS      k and v

Both sides may send while they receive: an engine need not wait for an OUTPUT before it sends the next rows. A
worker answers in order, and buffers a few unanswered messages.

A worker reports any error as a sentence in a FAILED message, and then closes the connection.
"""

import json
import socket
import struct
import time
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

VERSION = 6  # of this protocol; both sides must have the same
MAX_TEXT_BYTES = 1 << 20
MAX_BYTES = 1 << 31  # per message
LAST_S = 1.0  # for the peer to close the connection after a FAILED message
AT_ONCE_BYTES = 1 << 16  # shorter messages are sent in one piece with their header
_HEADER = struct.Struct("<BxHHxxIIQ")


class ProtocolError(ConnectionError):
    """The peer violated the protocol, or reported a failure."""


class Kind(IntEnum):
    """Types of messages."""

    SET_UP = 1
    READY = 2
    TABLES = 3
    ATTEND = 4
    OUTPUT = 5
    STORE = 6
    STORED = 7
    READ = 8
    ROWS = 9
    FAILED = 12


class Header(NamedTuple):
    """Header of a message."""

    kind: int
    layer: int
    table: int  # number of the block tables
    rows: int
    width: int  # blocks per row of the block tables
    num_bytes: int


class Channel:
    """An authenticated connection. Methods raise OSError for every failure.

    One thread may send while another one receives.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(
        self,
        kind: Kind,
        *payload: memoryview | bytes,
        layer: int = 0,
        table: int = 0,
        rows: int = 0,
        width: int = 0,
    ) -> None:
        num_bytes = sum(len(each) for each in payload)
        header = _HEADER.pack(kind, layer, table, rows, width, num_bytes)
        if num_bytes <= AT_ONCE_BYTES:
            self._socket.sendall(b"".join((header, *payload)))
            return
        self._socket.sendall(header)
        for each in payload:
            self._socket.sendall(each)

    def send_json(self, kind: Kind, value: Any) -> None:
        self.send(kind, json.dumps(value).encode())

    def header(self) -> Header:
        """Wait for the next message.

        Raises:
            ProtocolError: it exceeds the size limit, or reports a failure.
            ConnectionError: the peer has closed the connection.
        """
        header = Header(*_HEADER.unpack(self._exactly(_HEADER.size)))
        if header.kind == Kind.FAILED:
            raise ProtocolError(self._exactly(min(header.num_bytes, MAX_TEXT_BYTES)).decode(errors="replace"))
        if header.num_bytes > MAX_BYTES:
            raise ProtocolError(f"a message of {header.num_bytes} bytes is too long")
        return header

    def answer(self, kind: Kind) -> Header:
        header = self.header()
        if header.kind != kind:
            raise ProtocolError(f"received message {header.kind}, expected {kind.name}")
        return header

    def json(self, header: Header) -> Any:
        if header.num_bytes > MAX_TEXT_BYTES:
            raise ProtocolError(f"a text of {header.num_bytes} bytes is too long")
        try:
            return json.loads(self._exactly(header.num_bytes))
        except ValueError as error:
            raise ProtocolError(f"a message is not valid JSON: {error}") from None

    def read_into(self, header: Header, *tensors: Tensor) -> None:
        """Receive the payload of a message into contiguous host tensors of the same total size."""
        views = [bytes_of(each) for each in tensors]
        expected = sum(map(len, views))
        if header.num_bytes != expected:
            raise ProtocolError(f"a message has {header.num_bytes} bytes; expected {expected}")
        for view in views:
            self._fill(view)

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        self._fill(memoryview(data))
        return data

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionError("the peer closed the connection")
            view = view[count:]

    def fail(self, error: Exception) -> None:
        """Report the error that ends the connection.

        Input is drained for a moment: if a connection closes with unread input, it is reset, and the peer
        loses the last message.
        """
        with suppress(OSError):  # the peer is gone
            self.send(Kind.FAILED, str(error).encode())
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(LAST_S)
            end = time.monotonic() + LAST_S
            while time.monotonic() < end and self._socket.recv(AT_ONCE_BYTES):
                pass

    def close(self) -> None:
        """Close the connection and wake waiting threads; thread-safe, may be called again."""
        end(self._socket)


def end(connection: socket.socket) -> None:
    """Close a connection or listener, and wake threads that wait for it."""
    with suppress(OSError):  # already closed, or never connected
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor in host memory."""
    assert tensor.is_contiguous()
    if not tensor.numel():
        return memoryview(b"")
    return tensor.flatten().view(torch.uint8).numpy().data


def tune(connection: socket.socket) -> None:
    """Send small messages at once, and detect a dead peer within half a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # available on Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
