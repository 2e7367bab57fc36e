"""Run many chats for minutes with varied client behaviour: `python -m scripts.soak --minutes 10`.

A server (`neo-desktop chat`, the built-in model, its own data folder, loopback) gets many kinds of requests.
Some streams are read, some are left, some are not read. Others are complete answers, chats of the page,
malformed bodies, broken headers and half-sent requests. Half-way it is killed (SIGKILL) and restarted on the
same port. Prints memory over time and the latency of /health.

Exit code 1 if an answer is neither as requested nor a refusal; if /health fails, or takes more than 50 ms in
more than 1 % of the cases; if memory grows; if a chat has lost text shown more than a second before the kill.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from neo_desktop.app.chats.database import FILE_NAME
from scripts.server_process import answer, connection, percentile, request, server

MAX_P99_MS = 50.0
MAX_GROWTH = 1.25  # of memory, from a fifth of a server's run to its end
MEMORY_SLACK_MIB = 64
HEALTH_POLL_S = 0.02
# Small caches fill soon; first use of memory looks like a leak.
FLAGS = ("--policy", "neo", "--gpu-cache-tokens", "8192", "--cpu-cache-tokens", "8192")
SAVED_WITHIN_S = 1.5  # a second plus the polling interval


class Soak:
    """Counts and state of the run."""

    def __init__(self, port: int, data: Path) -> None:
        self.port = port
        self.data = data
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.health_s: list[float] = []
        self.is_down = False  # the server was killed; failures do not count now
        self.shown: dict[str, list[tuple[float, str]]] = {}  # chat → (time, shown text)
        self.finishing: asyncio.Future[Any] | None = None  # the last phase's clients
        self._random = random.Random(0)

    async def client(self, ends_s: float) -> None:
        """Run random actions in turn."""
        ways: list[Callable[[], Awaitable[None]]] = [
            self.read_stream, self.read_stream, self.whole, self.leave, self.do_not_read,
            self.page_chat, self.page_chat, self.malformed, self.broken, self.half,
        ]  # fmt: skip
        while time.monotonic() < ends_s:
            way = self._random.choice(ways)
            was_down = self.is_down
            try:
                async with asyncio.timeout(120):
                    await way()
                self.counts[way.__name__] += 1
            except (OSError, EOFError, TimeoutError, ValueError, IndexError, KeyError) as error:
                if was_down or self.is_down:
                    await asyncio.sleep(0.5)
                else:
                    self.violations.append(f"{way.__name__}: {type(error).__name__} {error}")

    def chat(self, stream: bool) -> dict[str, Any]:
        """Return a question that was never asked before."""
        words = " ".join(str(self._random.random()) for _ in range(self._random.randrange(1, 12)))
        content = f"What is attention? {words}"
        num_tokens = self._random.randrange(4, 120)
        return {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": num_tokens,
            "stream": stream,
        }

    async def read_stream(self) -> None:
        async with connection(self.port) as (reader, writer):
            writer.write(request("POST", "/v1/chat/completions", self.chat(True)))
            text = await reader.read()
            is_refused = text.startswith(b"HTTP/1.1 503")
            self.check(
                is_refused or text.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"), f"a stream ends {text[-80:]!r}"
            )

    async def whole(self) -> None:
        status, content = await answer(self.port, "POST", "/v1/chat/completions", self.chat(False))
        self.check(status == 503 or "choices" in json.loads(content), f"an answer of {status}")

    async def leave(self) -> None:
        async with connection(self.port) as (_, writer):
            writer.write(request("POST", "/v1/chat/completions", self.chat(self._random.random() < 0.5)))
            await asyncio.sleep(self._random.random() / 2)

    async def do_not_read(self) -> None:
        async with connection(self.port) as (reader, writer):
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(request("POST", "/v1/chat/completions", self.chat(True) | {"n": 4}))
            await asyncio.sleep(self._random.random() * 5)

    async def malformed(self) -> None:
        bodies = [b"{", b"[" * 9999, b"\xff", b"null", b'{"messages":[]}', b'{"messages":7}']
        body = self._random.choice(bodies)
        status, _ = await answer(self.port, "POST", "/v1/chat/completions", body)
        self.check(status == 400, f"a malformed body was answered with {status}")

    async def broken(self) -> None:
        async with connection(self.port) as (reader, writer):
            heads = [b"\x16\x03\x01", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nX\x00: y\r\n\r\n"]
            writer.write(self._random.choice(heads))
            await asyncio.wait_for(reader.read(), 60)

    async def half(self) -> None:
        async with connection(self.port) as (_, writer):
            whole = request("POST", "/v1/chat/completions", self.chat(True))
            writer.write(whole[: self._random.randrange(1, len(whole))])
            await asyncio.sleep(self._random.random())

    async def page_chat(self) -> None:
        """Ask through the page's API, and read the growing answer."""
        question = {"data": [f"What is a KV cache? {self._random.random()}", ""]}
        status, content = await answer(self.port, "POST", "/gradio_api/call/chat", question)
        self.check(status == 200, f"a question was answered with {status}: {content[:200]!r}")
        event_id = json.loads(content)["event_id"]
        async with connection(self.port) as (reader, writer):
            writer.write(request("GET", f"/gradio_api/call/chat/{event_id}"))
            while line := await reader.readline():
                if not line.startswith(b"data: ["):
                    continue
                (now,) = json.loads(line.removeprefix(b"data: "))
                self.shown.setdefault(now["chat_id"], []).append((time.monotonic(), now["text"]))
                if now["state"] not in ("waiting", "streaming"):
                    return
        self.check(False, "the page ended an answer's stream early")

    def check_chats(self, killed_s: float) -> None:
        """Check that the chat database has the text that was shown."""
        query = "SELECT chat_id, text FROM messages WHERE role = 'assistant'"
        with contextlib.closing(sqlite3.connect(self.data / FILE_NAME)) as database:
            found = dict(database.execute(query).fetchall())
        for chat_id, shown in self.shown.items():
            old = [text for when_s, text in shown if when_s < killed_s - SAVED_WITHIN_S]
            kept = found.get(chat_id)
            self.check(kept is not None, f"a chat was lost: {chat_id}")
            self.check(not old or (kept or "").startswith(old[-1]), f"a chat lost text: {chat_id}")
        self.counts["chats checked"] += len(self.shown)
        self.shown.clear()

    async def health(self, ends_s: float) -> None:
        """Ask /health on a kept connection."""
        while time.monotonic() < ends_s:
            try:
                async with connection(self.port) as (reader, writer):
                    while time.monotonic() < ends_s:
                        begun_s = time.perf_counter()
                        writer.write(request("GET", "/health").replace(b"Connection: close\r\n", b""))
                        content = await reader.readuntil(b"}")
                        self.health_s.append(time.perf_counter() - begun_s)
                        self.check(b'"ok"' in content, f"/health says {content!r}")
                        await asyncio.sleep(HEALTH_POLL_S)
            except (OSError, EOFError):
                self.check(self.is_down, "/health was not answered")
                await asyncio.sleep(0.2)

    def check(self, holds: bool, what: str) -> None:
        if not holds and not self.is_down:
            self.violations.append(what)


async def phase(soak: Soak, pid: int, num_chats: int, seconds: float) -> None:
    """Run the clients for some time, and check memory."""
    ends_s = time.monotonic() + seconds
    work = [asyncio.create_task(soak.client(ends_s)) for _ in range(num_chats)]
    work.append(asyncio.create_task(soak.health(ends_s)))
    process, memory_mib = psutil.Process(pid), []
    step_s = seconds / 20
    while time.monotonic() < ends_s:
        await asyncio.sleep(step_s)
        memory_mib.append(process.memory_info().rss / 2**20)
    print("memory (MiB):", " ".join(f"{mib:.0f}" for mib in memory_mib), flush=True)
    soak.finishing = asyncio.gather(*work)
    before, after = memory_mib[len(memory_mib) // 5], memory_mib[-1]
    is_flat = after < before * MAX_GROWTH + MEMORY_SLACK_MIB
    soak.check(is_flat, f"memory grew from {before:.0f} to {after:.0f} MiB")


async def until_ready(port: int) -> None:
    """Wait until the model is loaded."""
    while (await answer(port, "GET", "/health"))[0] != 200:
        await asyncio.sleep(0.1)


async def finish(soak: Soak) -> None:
    """Wait for the clients."""
    if soak.finishing is not None:
        await soak.finishing


def run(num_chats: int, minutes: float) -> int:
    """Run both server processes; return the number of violations."""
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory() as data:
        with server(*FLAGS, command="chat", data=Path(data)) as (process, port):
            soak = Soak(port, Path(data))
            loop.run_until_complete(until_ready(port))
            loop.run_until_complete(phase(soak, process.pid, num_chats, minutes * 30))
            soak.is_down = True
            killed_s = time.monotonic()
            process.kill()
        loop.run_until_complete(finish(soak))
        with server(*FLAGS, command="chat", data=Path(data), port=port) as (process, _):
            loop.run_until_complete(until_ready(port))
            soak.is_down = False
            soak.check_chats(killed_s)
            loop.run_until_complete(phase(soak, process.pid, num_chats, minutes * 30))
            loop.run_until_complete(finish(soak))
            soak.check_chats(time.monotonic() + 9)
    p50_ms, p99_ms = (percentile(soak.health_s, share) * 1e3 for share in (0.5, 0.99))
    soak.check(p99_ms <= MAX_P99_MS, f"the p99 of /health is {p99_ms:.0f} ms")
    figures = f"p50 {p50_ms:.1f}, p99 {p99_ms:.1f}, most {max(soak.health_s) * 1e3:.0f} ms"
    print(f"/health, {len(soak.health_s)} times: {figures}")
    print("done:", ", ".join(f"{name} {count}" for name, count in sorted(soak.counts.items())))
    for what, count in Counter(soak.violations).most_common(20):
        print(f"VIOLATION ({count} times): {what}")
    return len(soak.violations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--chats", type=int, default=64)
    options = parser.parse_args()
    sys.exit(1 if run(options.chats, options.minutes) else 0)


if __name__ == "__main__":
    main()
