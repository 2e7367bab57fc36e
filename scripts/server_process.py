"""A server for a script: by default the built-in model, on a free loopback port."""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

PROGRAM = Path(sys.executable).parent / "neo-desktop"


@contextlib.contextmanager
def server(
    *options: str, command: str = "serve", port: int = 0, data: Path | None = None
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a server; yield the process and its port once it answers. `data` is its folder for chats."""
    arguments = [str(PROGRAM), command, "--port", str(port), "--disk-cache", "0", *options]
    arguments += ["--no-browser"] if command == "chat" else []
    environment = os.environ | ({} if data is None else {"NEO_DESKTOP_DATA": str(data)})
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if address := re.search(r"http://127\.0\.0\.1:(\d+)/v1", line):
                    yield process, int(address[1])
                    return
            raise SystemExit("the server did not start")
        finally:
            process.kill()


@contextlib.contextmanager
def served(url: str | None, *options: str) -> Iterator[str]:
    """Yield the address of a server: `url`, or one that is started with these options."""
    if url is not None:
        yield url
        return
    with server(*options) as (_, port):
        yield f"http://127.0.0.1:{port}"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def request(method: str, path: str, body: Any = None) -> bytes:
    """Return one HTTP request that closes its connection; a body other than bytes becomes JSON."""
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n%s" % (len(content), content)


@contextlib.asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection to the server; close it at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answer(port: int, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """Send a request; return status and body."""
    async with connection(port) as (reader, writer):
        writer.write(request(method, path, body))
        head, _, content = (await reader.read()).partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), content
