"""Where the secret comes from that engine and workers know each other by, and the certificates, if any."""

import os
import secrets
import ssl
from pathlib import Path

from neo_desktop.engine.remote.greeting import check_secret

SECRET_VARIABLE = "NEO_DESKTOP_WORKER_SECRET"
HOW = f"give both sides the same: with --worker-secret FILE, or in the variable {SECRET_VARIABLE}"


def default_path() -> Path:
    """Return where the secret is kept, if nobody says anything else."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config", "neo-desktop", "worker.secret").expanduser()


def read_secret(path: Path | None) -> bytes:
    """Return the secret: of a file, of the environment, or of the user's own file.

    Raises:
        ValueError: there is none, or it is too short.
    """
    named = os.environ.get(SECRET_VARIABLE)
    if path is None and named:
        return check_secret(named.strip().encode())
    path = path or default_path()
    try:
        return check_secret(path.read_bytes().strip())
    except FileNotFoundError:
        raise ValueError(f"engine and workers need a secret, and {path} is not there: {HOW}") from None
    except ValueError as error:
        raise ValueError(f"{error}: {path}") from None


def make_secret(path: Path | None) -> Path | None:
    """Make a secret where there is none yet, readable for its owner alone; return the file, if it is new."""
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
    """Return how to check workers' certificates, by who signed them; None: there are none.

    Raises:
        ValueError: the file cannot be used.
    """
    if authority is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(authority))
    except OSError as error:
        raise ValueError(f"{authority} is no file of certificates: {error}") from None


def worker_tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Return what a worker shows; None: it has no certificate. Raises as `engine_tls`."""
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        raise ValueError(f"{certificate} and its key cannot be used: {error}") from None
    return context
