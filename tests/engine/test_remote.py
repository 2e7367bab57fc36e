"""Access to a worker: accepted clients, answers and refusals."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from pipeline_case import tiny_config, tiny_model
from workers import SECRET, TRUST, running_worker, shape_of, sinks_of

from neo_desktop.engine.remote import trust
from neo_desktop.engine.remote.link import Address, Trust, WorkerLink, WorkerLostError
from neo_desktop.engine.remote.session import fitting_blocks
from neo_desktop.engine.remote.shape import AttentionShape
from neo_desktop.engine.remote.trust import RefusedError, greet
from neo_desktop.engine.remote.wire import Channel, Kind, ProtocolError
from neo_desktop.models.decoder import Decoder

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model(attention_sinks=True, softcap=0.5)


@pytest.fixture
def address() -> Iterator[Address]:
    with running_worker() as (_, address):
        yield address


def open_link(model: Decoder, address: Address, trust: Trust = TRUST, most: int = 8) -> WorkerLink:
    link = WorkerLink("worker-1", lambda: address, trust)
    link.open(shape_of(model, BLOCK_SIZE), sinks_of(model), most)
    return link


def open_next(model: Decoder, address: Address, most: int = 8) -> WorkerLink:
    """Open a link as soon as the worker has ended the previous session, which takes a moment."""
    for _ in range(400):
        with suppress(ProtocolError):
            return open_link(model, address, most=most)
        threading.Event().wait(0.05)
    raise AssertionError("the worker does not end the last session")


def test_a_worker_gives_as_many_blocks_as_it_has_memory_for_or_as_are_of_use(model: Decoder) -> None:
    shape = shape_of(model, BLOCK_SIZE)
    with running_worker(memory_bytes=1 << 20) as (_, address):
        fitting = fitting_blocks(shape, 1 << 20)
        assert 0 < fitting < 10_000
        link = open_link(model, address, most=10_000)
        assert link.num_blocks == fitting
        link.close()
        link = open_next(model, address, most=5)
        assert link.num_blocks == 5
        link.close()


@pytest.mark.parametrize("is_stranger", [True, False], ids=["engine", "worker"])
def test_another_secret_is_refused_and_said(model: Decoder, is_stranger: bool) -> None:
    other = b"another secret that is long enough"
    secrets = (SECRET, other) if is_stranger else (other, SECRET)
    with (
        running_worker(secret=secrets[0]) as (_, address),
        pytest.raises(RefusedError, match="the worker has another secret"),
    ):
        open_link(model, address, Trust(secrets[1]))


def against(worker: Callable[[socket.socket], None]) -> None:
    """Greet an impostor instead of a worker."""
    here, there = socket.socketpair()
    thread = threading.Thread(target=worker, args=(there,))
    thread.start()
    try:
        greet(here, SECRET)
    finally:
        here.close()
        thread.join(60)
        there.close()


def test_whoever_does_not_know_the_secret_cannot_stand_for_a_worker() -> None:
    def impostor(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(struct.pack("<8sH32s", trust.MAGIC, trust.VERSION, bytes(32)))
        proof = connection.recv(100)
        connection.sendall(b"\x01" + proof)  # the engine's own proof, replayed

    with pytest.raises(RefusedError, match="does not know the secret"):
        against(impostor)


def test_another_version_and_another_service_are_refused_in_words() -> None:
    def newer(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(struct.pack("<8sH32s", trust.MAGIC, trust.VERSION + 1, bytes(32)))

    def web_server(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    with pytest.raises(RefusedError, match=f"version {trust.VERSION + 1} .* install the same version"):
        against(newer)
    with pytest.raises(RefusedError, match="uses another protocol: is this the right port"):
        against(web_server)
    with pytest.raises(RefusedError, match="closed the connection"):
        against(lambda connection: connection.shutdown(socket.SHUT_WR))


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nUser-Agent: a stranger\r\n\r\n",
        b"\x16\x03\x01" + bytes(60),
        struct.pack("<8sH32s", trust.MAGIC, trust.VERSION, bytes(32)) + bytes(32),
        struct.pack("<8sH32s", trust.MAGIC, 99, bytes(32)) + bytes(32),
        b"",
    ],
)
def test_strangers_are_hung_up_on_and_the_worker_goes_on(
    model: Decoder, address: Address, said: bytes
) -> None:
    with socket.create_connection((address.host, address.port), 20) as connection:
        heard = b""
        with suppress(OSError):  # the worker may have hung up already
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(4096):
                heard += piece
        assert not heard or heard.startswith(trust.MAGIC)
        assert len(heard) <= 43  # a greeting without an acceptance
    open_link(model, address).close()


def test_one_engine_at_a_time_and_the_next_one_once_it_is_gone(model: Decoder, address: Address) -> None:
    first = open_link(model, address)
    with pytest.raises(ProtocolError, match="attends for another engine"):
        open_link(model, address)
    check_that_it_answers(first)
    first.close()
    second = open_next(model, address)
    check_that_it_answers(second)
    second.close()


def test_an_engine_that_lost_the_connection_comes_back_at_once(model: Decoder, address: Address) -> None:
    """Its old session ends, even if the worker does not know that the connections are dead."""
    link = open_link(model, address)
    assert link._attention is not None
    old, link._attention = link._attention, None  # still open, and silent
    link.open(shape_of(model, BLOCK_SIZE), sinks_of(model), 8)
    check_that_it_answers(link)
    with pytest.raises(ConnectionError):
        old.header()
    link.close()


def channel_of(link: WorkerLink) -> Channel:
    assert link._attention is not None
    return link._attention


def test_what_cannot_be_is_refused_and_ends_the_session(model: Decoder, address: Address) -> None:
    heads = model.config.num_heads + 2 * model.config.num_kv_heads
    qkv = bytes(heads * model.config.head_dim * 4)

    def table(*blocks: int, length: int) -> bytes:
        return struct.pack(f"<{1 + len(blocks)}i", length, *blocks)

    def attend(channel: Channel, tables: bytes, width: int) -> None:
        channel.send(Kind.TABLES, tables, rows=1, width=width)
        channel.send(Kind.ATTEND, qkv, rows=1)

    bad: dict[str, Callable[[Channel], None]] = {
        "is unknown": lambda channel: channel.send(Kind.OUTPUT),
        "there is no layer 77": lambda channel: channel.send(Kind.READ, layer=77),
        "bytes; expected": lambda channel: channel.send(Kind.STORE, bytes(8), rows=1),
        "are too many": lambda channel: channel.send(Kind.READ, rows=1 << 30),
        "no room for block table 9": lambda channel: channel.send(Kind.TABLES, table=9),
        "is not one of 1 requests": lambda channel: channel.send(Kind.ATTEND, qkv, rows=1),
        "block_tables": lambda channel: attend(channel, table(10_000, length=1), 1),
        "context_lens": lambda channel: attend(channel, table(0, length=1000), 1),
        "slots": lambda channel: channel.send(Kind.READ, struct.pack("<q", -5), rows=1),
    }
    for words, say in bad.items():
        link = open_next(model, address)
        channel = channel_of(link)
        say(channel)
        with pytest.raises(ProtocolError, match=words):
            channel.header()
        link.close()


def test_a_shape_that_cannot_be_is_refused(model: Decoder) -> None:
    good = shape_of(model, BLOCK_SIZE).to_json()
    assert AttentionShape.from_json(good) == shape_of(model, BLOCK_SIZE)
    for name, value in {
        "num_heads": 0,
        "num_kv_heads": 3,
        "head_dim": 1 << 40,
        "kv_parts": 3,
        "block_size": "16",
        "windows": [-1],
        "dtype": "torch.int8",
        "kv_dtype": "torch.complex64",
        "scale": None,
        "attention_softcap": -50.0,
        "more": 1,
    }.items():
        with pytest.raises(ProtocolError, match="cannot be used"):
            AttentionShape.from_json(good | {name: value})
    for data in (None, [], {}, "shape"):
        with pytest.raises(ProtocolError, match="cannot be used"):
            AttentionShape.from_json(data)


def test_a_worker_that_does_not_answer_is_lost_by_name_after_a_while(model: Decoder) -> None:
    """The system accepts connections for the worker, but no answer follows."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = WorkerLink("worker-3", lambda: Address(*silent.getsockname()), Trust(SECRET, timeout_s=0.2))
        with pytest.raises(TimeoutError):
            link.open(shape_of(model, BLOCK_SIZE), sinks_of(model), 8)
        with pytest.raises(WorkerLostError, match="worker-3 is lost: it is not connected"):
            check_that_it_answers(link)


def check_that_it_answers(link: WorkerLink) -> None:
    link.read(0, torch.tensor([0]), torch.empty(2, 1, *_row_shape()))


def _row_shape() -> tuple[int, int]:
    config = tiny_config()
    return config.num_kv_heads, config.head_dim
