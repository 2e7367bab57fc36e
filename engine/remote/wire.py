"""How an engine and a worker talk: messages of a fixed header and raw bytes, the lowest first.

    engine                              worker
    SET_UP   JSON: shapes; sinks   →
                                   ←    READY     JSON: how many blocks there are
    TABLES   context lens, tables  →              once for all layers of an iteration; no answer
    ATTEND   q, k, v of a layer    →
                                   ←    OUTPUT    the attention's output
    STORE    slots, k and v        →
                                   ←    STORED
    READ     slots                 →
                                   ←    ROWS      k and v

Each side may send while it receives: an engine need not wait for an OUTPUT before it sends the next rows. A
worker answers in order, and has room for a few messages that it has not answered.

Whatever goes wrong with a worker is a sentence in a FAILED message, behind which it closes the connection.
"""

import json
import socket
import ssl
import struct
import time
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neo_desktop.engine.remote.tls import SharedTls

VERSION = 4  # of all of this; both sides must have the same
MAX_TEXT_BYTES = 1 << 20
MAX_BYTES = 1 << 31  # of a message
LAST_S = 1.0  # for the other side to hang up, once it was told why
AT_ONCE_BYTES = 1 << 16  # shorter messages leave in one piece with their header
_HEADER = struct.Struct("<BxHHxxIIQ")


class ProtocolError(ConnectionError):
    """The other side says what it must not say, or says that something failed."""


class Kind(IntEnum):
    """What a message is."""

    SET_UP = 1
    READY = 2
    TABLES = 3
    ATTEND = 4
    OUTPUT = 5
    STORE = 6
    STORED = 7
    READ = 8
    ROWS = 9
    PING = 10
    PONG = 11
    FAILED = 12


class Header(NamedTuple):
    """What precedes the bytes of a message."""

    kind: int
    layer: int
    table: int  # which of the block tables that were sent
    rows: int
    width: int  # blocks of a row of the block tables
    num_bytes: int


class Channel:
    """A connection, once both sides trust each other. Raises OSError for all that can go wrong.

    One thread may send while another one receives.
    """

    def __init__(self, connection: socket.socket) -> None:
        shared = SharedTls(connection) if isinstance(connection, ssl.SSLSocket) else None
        self._socket: socket.socket | SharedTls = shared or connection

    def send(
        self,
        kind: Kind,
        *payload: memoryview | bytes,
        layer: int = 0,
        table: int = 0,
        rows: int = 0,
        width: int = 0,
    ) -> None:
        """Send a message."""
        num_bytes = sum(len(each) for each in payload)
        header = _HEADER.pack(kind, layer, table, rows, width, num_bytes)
        if num_bytes <= AT_ONCE_BYTES:
            self._socket.sendall(b"".join((header, *payload)))
            return
        self._socket.sendall(header)
        for each in payload:
            self._socket.sendall(each)

    def send_json(self, kind: Kind, value: Any) -> None:
        """Send plain data."""
        self.send(kind, json.dumps(value).encode())

    def header(self) -> Header:
        """Wait for the next message.

        Raises:
            ProtocolError: it is longer than any may be, or says what failed.
            ConnectionError: the other side has closed the connection.
        """
        found = Header(*_HEADER.unpack(self._exactly(_HEADER.size)))
        if found.kind == Kind.FAILED:
            raise ProtocolError(self._exactly(min(found.num_bytes, MAX_TEXT_BYTES)).decode(errors="replace"))
        if found.num_bytes > MAX_BYTES:
            raise ProtocolError(f"a message of {found.num_bytes} bytes is too long")
        return found

    def answer(self, kind: Kind) -> Header:
        """Wait for an answer of this kind."""
        found = self.header()
        if found.kind != kind:
            raise ProtocolError(f"message {found.kind} came where {kind.name} was expected")
        return found

    def json(self, header: Header) -> Any:
        """Return the data of a message."""
        if header.num_bytes > MAX_TEXT_BYTES:
            raise ProtocolError(f"a text of {header.num_bytes} bytes is too long")
        try:
            return json.loads(self._exactly(header.num_bytes))
        except ValueError as error:
            raise ProtocolError(f"a message is no JSON: {error}") from None

    def read_into(self, header: Header, *tensors: Tensor) -> None:
        """Take the bytes of a message in; the tensors are contiguous, in host memory, and as long as it."""
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
                raise ConnectionError("the other side has closed the connection")
            view = view[count:]

    def fail(self, error: Exception) -> None:
        """Say why nothing more will come.

        What the other side still sends is read for a moment: a connection that is closed before that is
        reset, and what was said last is lost.
        """
        with suppress(OSError):  # it is gone
            self.send(Kind.FAILED, str(error).encode())
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(LAST_S)
            end = time.monotonic() + LAST_S
            while time.monotonic() < end and self._socket.recv(AT_ONCE_BYTES):
                pass

    def close(self) -> None:
        """End the connection, whoever waits for it; may be called again, from any thread."""
        end(self._socket)


def end(connection: socket.socket | SharedTls) -> None:
    """End a connection or a listener, whoever waits for it in another thread."""
    with suppress(OSError):  # it has ended, or was never there
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor in host memory."""
    assert tensor.is_contiguous()
    if not tensor.numel():
        return memoryview(b"")
    return tensor.flatten().view(torch.uint8).numpy().data


def tune(connection: socket.socket) -> None:
    """Let small messages leave at once, and find out within half a minute that nobody is there any more."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # Linux has them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
