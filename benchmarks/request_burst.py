"""Latency of /health while many requests arrive at once.

    python -m benchmarks.request_burst --requests 2000

Starts a server (the built-in model, a free port) and sends all requests at the same moment, one per
connection. Until all are answered it requests /health every 5 ms on a kept connection. Prints percentiles,
asserts nothing.
"""

import argparse
import asyncio
import multiprocessing
import time
from multiprocessing.synchronize import Event

from scripts.server_process import percentile, request, server

POLL_S = 0.005


async def ask(port: int, is_time: asyncio.Event, content: bytes) -> int:
    """Send one request at the given time; return the status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await is_time.wait()
    writer.write(content)
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1])


async def burst(port: int, count: int, content: bytes, begins: Event) -> dict[int, int]:
    is_time = asyncio.Event()
    asking = [asyncio.create_task(ask(port, is_time, content)) for _ in range(count)]
    await asyncio.sleep(2)  # all are connected
    begins.set()
    is_time.set()
    statuses = await asyncio.gather(*asking)
    return {status: statuses.count(status) for status in set(statuses)}


async def poll(port: int, begins: Event, ends: Event) -> list[float]:
    """Return the durations of /health, in seconds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    taken_s = []
    while not ends.is_set():
        begun_s = time.perf_counter()
        writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        await reader.readuntil(b"}")
        if begins.is_set():
            taken_s.append(time.perf_counter() - begun_s)
        await asyncio.sleep(POLL_S)
    return taken_s


def watch(port: int, begins: Event, ends: Event, answers: "multiprocessing.Queue[list[float]]") -> None:
    answers.put(asyncio.run(poll(port, begins, ends)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--words", type=int, default=30, help="of each question")
    parser.add_argument("--max-tokens", type=int, default=16)
    options = parser.parse_args()
    messages = [{"role": "user", "content": " ".join(["word"] * options.words)}]
    body = {"messages": messages, "max_tokens": options.max_tokens}
    content = request("POST", "/v1/chat/completions", body)
    begins, ends = multiprocessing.Event(), multiprocessing.Event()
    answers: multiprocessing.Queue[list[float]] = multiprocessing.Queue()
    with server() as (_, port):
        watching = multiprocessing.Process(target=watch, args=(port, begins, ends, answers))
        watching.start()
        begun_s = time.perf_counter()
        statuses = asyncio.run(burst(port, options.requests, content, begins))
        ends.set()
        taken_s = answers.get()
        watching.join()
    print(f"{options.requests} requests in {time.perf_counter() - begun_s - 2:.1f} s: {statuses}")
    figures = [
        f"p{share:.0%}".rstrip("%") + f" {percentile(taken_s, share) * 1e3:.1f}" for share in (0.5, 0.9, 0.99)
    ]
    print(f"/health, {len(taken_s)} times: {', '.join(figures)}, most {max(taken_s) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
