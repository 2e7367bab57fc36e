"""Self-signed certificates."""

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, name: str) -> Path:
    """Return a file with a certificate of this computer and its key; skip the test without openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the command openssl")
    key, certificate = folder / f"{name}.key", folder / f"{name}.crt"
    made = ("-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=worker")
    names = ("-addext", "subjectAltName=IP:127.0.0.1")
    command = ("openssl", "req", *made, *names, "-keyout", key, "-out", certificate)
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    both = folder / f"{name}.pem"
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    return both
