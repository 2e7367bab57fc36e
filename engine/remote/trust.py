"""Sources of the shared secret, and of TLS certificates."""

import os
import secrets
import ssl
from pathlib import Path

from neo_desktop.engine.remote.greeting import check_secret

SECRET_VARIABLE = "NEO_DESKTOP_WORKER_SECRET"
HOW = f"give both sides the same secret, with --worker-secret FILE or in the variable {SECRET_VARIABLE}"


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


def engine_tls(authority: Path | None) -> ssl.SSLContext | None:
    """Return a TLS context that verifies workers' certificates with this authority; None: no TLS.

    Raises:
        ValueError: the file cannot be used.
    """
    if authority is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(authority))
    except OSError as error:
        raise ValueError(f"{authority} is not a certificate file: {error}") from None


def worker_tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Return a worker's TLS context; None: it has no certificate. Raises the errors of `engine_tls`."""
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        raise ValueError(f"{certificate} and its key cannot be used: {error}") from None
    return context
