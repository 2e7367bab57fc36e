"""The engine's connections to a worker."""

import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from neo_desktop.engine.cuda.copies import HostBuffer
from neo_desktop.engine.remote.session import CPU, NUM_TABLES
from neo_desktop.engine.remote.shape import AttentionShape
from neo_desktop.engine.remote.trust import check_secret, greet
from neo_desktop.engine.remote.wire import Channel, Kind, bytes_of, tune

DEFAULT_PORT = 7455
DEFAULT_TIMEOUT_S = 10.0  # for a worker's answer


class WorkerLostError(RuntimeError):
    """A worker does not answer; its KV is lost. The reason has neither name nor address."""

    def __init__(self, worker: str, reason: str, address: str = "") -> None:
        super().__init__(worker, reason, address)
        self.worker = worker
        self.reason = reason
        self.address = address

    def __str__(self) -> str:
        return f"{self.worker} is lost: {self.reason}" + (f" ({self.address})" if self.address else "")


@dataclass(frozen=True, slots=True)
class Address:
    """Network address of a worker."""

    host: str
    port: int = DEFAULT_PORT

    @classmethod
    def parse(cls, text: str, least_port: int = 1, default_port: int = DEFAULT_PORT) -> "Address":
        """Parse `HOST`, `HOST:PORT` or `[IPv6]:PORT`; raise ValueError for anything else."""
        host, separator, port = text.rpartition(":")
        if not separator or text.endswith("]") or (":" in host and not host.endswith("]")):
            host, port = text, str(default_port)
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdigit() or not least_port <= int(port) <= 65535:
            raise ValueError(f"{text!r} is not a worker address: expected HOST or HOST:PORT")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Trust:
    """Credentials that engine and worker use to authenticate each other."""

    secret: bytes = field(repr=False)
    timeout_s: float = DEFAULT_TIMEOUT_S

    def __post_init__(self) -> None:
        check_secret(self.secret)


class WorkerLink:
    """Two connections to a worker: one for attention, one for rows stored and read in parallel.

    Each connection may have its own thread. The attention connection may have two: one sends requests, the
    other receives answers. The first failure closes both connections and wakes all waiting threads.

    Args:
        find: returns the worker's address; called at each `open`.
    """

    def __init__(self, name: str, find: Callable[[], Address], trust: Trust) -> None:
        self.name = name
        self.address: Address | None = None  # None: not known yet
        self._find = find
        self.num_blocks = 0
        self._trust = trust
        self._engine = secrets.token_hex(16)
        self._shape: AttentionShape | None = None
        self._attention: Channel | None = None
        self._rows: Channel | None = None
        self._asking, self._answering, self._moving = (threading.Lock() for _ in range(3))
        self._lost: WorkerLostError | None = None
        # context lengths of the tables that the worker has
        self._tables: list[Tensor | None] = [None] * NUM_TABLES
        self._by_use = list(range(NUM_TABLES))  # least recently used first
        self._buffer = HostBuffer(CPU)

    def open(self, shape: AttentionShape, sinks: Tensor | None, most_blocks: int) -> None:
        """Connect; `num_blocks` is known afterwards.

        Args:
            sinks: [layers, heads] fp32; None: the model has none.
            most_blocks: upper limit on useful blocks.

        Raises:
            OSError: the worker is unreachable, or refuses.
        """
        self.close()
        self.address = self._find()
        names = {"engine": self._engine, "session": secrets.token_hex(16)}
        attention = self._connect(self.address)
        try:
            asked = names | {"shape": shape.to_json(), "most_blocks": most_blocks}
            attention.send_json(Kind.SET_UP, asked)
            if sinks is not None:
                attention.send(Kind.SET_UP, bytes_of(sinks.to(CPU, torch.float32).contiguous()))
            self.num_blocks = int(attention.json(attention.answer(Kind.READY))["num_blocks"])
            rows = self._connect(self.address)
            rows.send_json(Kind.SET_UP, names | {"joins": True})
            rows.json(rows.answer(Kind.READY))
        except BaseException:
            attention.close()
            raise
        self._shape = shape
        self._tables = [None] * NUM_TABLES
        self._attention, self._rows, self._lost = attention, rows, None

    def _connect(self, address: Address) -> Channel:
        trust = self._trust
        connection = socket.create_connection((address.host, address.port), trust.timeout_s)
        try:
            tune(connection)
            greet(connection, trust.secret)
        except BaseException:
            connection.close()
            raise
        return Channel(connection)

    def ask(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, block_tables: Tensor, context_lens: Tensor
    ) -> None:
        """Send rows for attention; the arguments are those of `KVLayer.decode`.

        The worker accepts `NUM_INPUTS` messages before the first answer. Every answer must be received, in
        order.

        Raises:
            WorkerLostError: the worker does not answer.
        """
        with self._using(self._attention, self._asking) as channel:
            table = self._table(channel, block_tables, context_lens)
            qkv = self._joined(q, k, v)
            channel.send(Kind.ATTEND, bytes_of(qkv), layer=layer, table=table, rows=len(q))

    def answer(self, out: Tensor) -> None:
        """Wait for the output of the oldest unanswered rows; raises the errors of `ask`."""
        with self._using(self._attention, self._answering) as channel:
            channel.read_into(channel.answer(Kind.OUTPUT), out)

    def _joined(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return q, k and v in one array, [requests, heads + kv_parts * kv_heads, head_dim]."""
        parts = self._parts(k, v)
        heads, kv_heads = q.shape[1], k.shape[1]
        qkv = self._buffer.view((len(q), heads + len(parts) * kv_heads, q.shape[2]), q.dtype)
        # With numpy: torch would wake its threads, which is not worth it for a few bytes.
        into = qkv.view(torch.uint8).numpy()
        first = 0
        for part in (q, *parts):
            into[:, first : first + part.shape[1]] = part.view(torch.uint8).numpy()
            first += part.shape[1]
        return qkv

    def _parts(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of KV that the worker stores."""
        return (k, v) if self._shape is None else (k, v)[: self._shape.kv_parts]

    def _table(self, channel: Channel, block_tables: Tensor, context_lens: Tensor) -> int:
        """Return the number of these block tables; send them first if the worker lacks them."""
        is_known = [known is context_lens for known in self._tables]
        number = is_known.index(True) if any(is_known) else self._by_use[0]
        if not any(is_known):
            payload = bytes_of(context_lens), bytes_of(block_tables)
            rows, width = block_tables.shape
            channel.send(Kind.TABLES, *payload, table=number, rows=rows, width=width)
            self._tables[number] = context_lens
        # Async decodes have a table per layer, which must not evict the tables of sub-batches.
        self._by_use.remove(number)
        self._by_use.append(number)
        return number

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store rows, [rows, kv_heads, head_dim] each, in slots, [rows] int64; raises the errors of `ask`."""
        with self._using(self._rows, self._moving) as channel:
            payload = (bytes_of(each.contiguous()) for each in (slots, *self._parts(k, v)))
            channel.send(Kind.STORE, *payload, layer=layer, rows=len(slots))
            channel.read_into(channel.answer(Kind.STORED))

    def read(self, layer: int, slots: Tensor, out: Tensor) -> None:
        """Read the rows of slots into [kv_parts, rows, kv_heads, head_dim]; raises the errors of `ask`."""
        with self._using(self._rows, self._moving) as channel:
            channel.send(Kind.READ, bytes_of(slots.contiguous()), layer=layer, rows=len(slots))
            channel.read_into(channel.answer(Kind.ROWS), out)

    @contextmanager
    def _using(self, channel: Channel | None, lock: threading.Lock) -> Iterator[Channel]:
        with lock:
            if self._lost is not None:
                raise WorkerLostError(self.name, self._lost.reason, self._lost.address) from self._lost
            if channel is None:
                raise WorkerLostError(self.name, "it is not connected")
            try:
                yield channel
            except OSError as error:
                raise self._lose(error) from error

    def _lose(self, error: OSError) -> WorkerLostError:
        reason = str(error)
        if isinstance(error, TimeoutError):
            reason = f"it has not answered for {self._trust.timeout_s:g} s"
        lost = self._lost
        if lost is None:
            lost = self._lost = WorkerLostError(self.name, reason, str(self.address or ""))
        self.close()
        return lost

    def close(self) -> None:
        """Close both connections; thread-safe, may be called again."""
        for channel in (self._attention, self._rows):
            if channel is not None:
                channel.close()
