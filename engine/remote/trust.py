"""Trust between engine and worker: the shared secret, and mutual authentication.

    engine                                        worker
    "NEO-WORK", version, nonce e    →
                                    ←             "NEO-WORK", version, nonce w
    HMAC(secret, "engine", e, w)    →
                                    ←             1, HMAC(secret, "worker", e, w); or 0

The engine proves itself first: a stranger at the worker's port learns nothing that helps to guess the secret.
Later traffic is neither encrypted nor signed.
"""

import hashlib
import hmac
import os
import secrets
import socket
import struct
from pathlib import Path

from neo_desktop.engine.remote.wire import VERSION

SECRET_VARIABLE = "NEO_DESKTOP_WORKER_SECRET"
HOW = f"give both sides the same secret, with --worker-secret FILE or in the variable {SECRET_VARIABLE}"
MAGIC = b"NEO-WORK"
MIN_SECRET_BYTES = 16
NONCE_BYTES = 32
_HELLO = struct.Struct(f"<8sH{NONCE_BYTES}s")
_YES, _NO = b"\x01", b"\x00"


class RefusedError(ConnectionError):
    """The peer is not trusted, or refuses the connection."""


def check_secret(secret: bytes) -> bytes:
    """Return the secret; raise ValueError if it is too short."""
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"the workers' secret must have at least {MIN_SECRET_BYTES} characters")
    return secret


def greet(connection: socket.socket, secret: bytes) -> None:
    """Authenticate to a worker.

    Raises:
        RefusedError: the peer is no worker, has another version, or another secret.
        OSError: the connection failed.
    """
    mine = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(_HELLO.pack(MAGIC, VERSION, mine))
    theirs = _checked(_exactly(connection, _HELLO.size), "the worker")
    connection.sendall(_proof(secret, b"engine", mine, theirs))
    if _exactly(connection, 1) != _YES:
        raise RefusedError("the worker has another secret")
    proof = _exactly(connection, hashlib.sha256().digest_size)
    if not hmac.compare_digest(proof, _proof(secret, b"worker", mine, theirs)):
        raise RefusedError("the peer is no worker: it does not know the secret")


def welcome(connection: socket.socket, secret: bytes) -> None:
    """Authenticate an engine; raises the errors of `greet`."""
    hello = _exactly(connection, _HELLO.size)
    mine = secrets.token_bytes(NONCE_BYTES)
    if hello.startswith(MAGIC):  # so that the peer can report the error
        connection.sendall(_HELLO.pack(MAGIC, VERSION, mine))
    theirs = _checked(hello, "the engine")
    proof = _exactly(connection, hashlib.sha256().digest_size)
    if not hmac.compare_digest(proof, _proof(secret, b"engine", theirs, mine)):
        connection.sendall(_NO)
        raise RefusedError("the engine has another secret")
    connection.sendall(_YES + _proof(secret, b"worker", theirs, mine))


def _checked(hello: bytes, who: str) -> bytes:
    magic, version, nonce = _HELLO.unpack(hello)
    if magic != MAGIC:
        raise RefusedError(f"{who} uses another protocol: is this the right port?")
    if version != VERSION:
        raise RefusedError(
            f"{who} speaks version {version} of the workers' protocol, and this program version {VERSION}: "
            "install the same version of neo-desktop on both computers"
        )
    return bytes(nonce)


def _proof(secret: bytes, side: bytes, engine_nonce: bytes, worker_nonce: bytes) -> bytes:
    return hmac.digest(secret, side + engine_nonce + worker_nonce, "sha256")


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise RefusedError("the peer closed the connection before it authenticated")
        data += piece
    return data


def default_path() -> Path:
    """Return the default path of the secret."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config", "neo-desktop", "worker.secret").expanduser()


def read_secret(path: Path | None) -> bytes:
    """Return the secret from a file, the environment, or the user's default file.

    Raises:
        ValueError: the secret is missing or too short.
    """
    named = os.environ.get(SECRET_VARIABLE)
    if path is None and named:
        return check_secret(named.strip().encode())
    path = path or default_path()
    try:
        return check_secret(path.read_bytes().strip())
    except FileNotFoundError:
        raise ValueError(f"engine and workers need a secret, but {path} does not exist: {HOW}") from None
    except ValueError as error:
        raise ValueError(f"{error}: {path}") from None


def make_secret(path: Path | None) -> Path | None:
    """Create a secret if none exists, readable only by its owner; return the file if it is new."""
    if path is None and os.environ.get(SECRET_VARIABLE):
        return None
    path = path or default_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return None
    with os.fdopen(file, "w") as text:
        text.write(secrets.token_urlsafe(32) + "\n")
    return path
