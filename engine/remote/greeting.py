"""Engine and worker show each other that they know the same secret, which neither sends.

    engine                                        worker
    "NEO-WORK", version, nonce e    →
                                    ←             "NEO-WORK", version, nonce w
    HMAC(secret, "engine", e, w)    →
                                    ←             1, HMAC(secret, "worker", e, w); or 0

The engine comes first: whoever knocks at a worker's port learns nothing to guess the secret with. What
follows is neither encrypted nor signed, unless the connection is one of TLS.
"""

import hashlib
import hmac
import secrets
import socket
import struct

from neo_desktop.engine.remote.wire import VERSION

MAGIC = b"NEO-WORK"
MIN_SECRET_BYTES = 16
NONCE_BYTES = 32
_HELLO = struct.Struct(f"<8sH{NONCE_BYTES}s")
_YES, _NO = b"\x01", b"\x00"


class RefusedError(ConnectionError):
    """The other side is none that one may talk to, or does not want to."""


def check_secret(secret: bytes) -> bytes:
    """Return a secret that is long enough; ValueError: it is not."""
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"the workers' secret must have at least {MIN_SECRET_BYTES} characters")
    return secret


def greet(connection: socket.socket, secret: bytes) -> None:
    """Greet a worker.

    Raises:
        RefusedError: it is none, of another version, or has another secret.
        OSError: the connection failed.
    """
    mine = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(_HELLO.pack(MAGIC, VERSION, mine))
    theirs = _nonce(connection, "the worker")
    connection.sendall(_proof(secret, b"engine", mine, theirs))
    if _exactly(connection, 1) != _YES:
        raise RefusedError("the worker has another secret")
    proof = _exactly(connection, hashlib.sha256().digest_size)
    if not hmac.compare_digest(proof, _proof(secret, b"worker", mine, theirs)):
        raise RefusedError("what answers is no worker: it does not know the secret")


def welcome(connection: socket.socket, secret: bytes) -> None:
    """Answer an engine; raises as `greet`."""
    hello = _exactly(connection, _HELLO.size)
    mine = secrets.token_bytes(NONCE_BYTES)
    if hello.startswith(MAGIC):  # so that it can say what is wrong
        connection.sendall(_HELLO.pack(MAGIC, VERSION, mine))
    theirs = _checked(hello, "the engine")
    proof = _exactly(connection, hashlib.sha256().digest_size)
    if not hmac.compare_digest(proof, _proof(secret, b"engine", theirs, mine)):
        connection.sendall(_NO)
        raise RefusedError("the engine has another secret")
    connection.sendall(_YES + _proof(secret, b"worker", theirs, mine))


def _nonce(connection: socket.socket, who: str) -> bytes:
    return _checked(_exactly(connection, _HELLO.size), who)


def _checked(hello: bytes, who: str) -> bytes:
    """Return the nonce."""
    magic, version, nonce = _HELLO.unpack(hello)
    if magic != MAGIC:
        raise RefusedError(f"{who} speaks another language: is this the right port?")
    if version != VERSION:
        raise RefusedError(
            f"{who} speaks version {version} of the workers' protocol, and this program version {VERSION}: "
            "install the same version of neo-desktop on both computers"
        )
    return bytes(nonce)


def _proof(secret: bytes, side: bytes, of_engine: bytes, of_worker: bytes) -> bytes:
    return hmac.digest(secret, side + of_engine + of_worker, "sha256")


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise RefusedError(
                "the other side has closed the connection before it said who it is; if it wants TLS, say who "
                "signed its certificate"
            )
        data += piece
    return data
