"""Time to the first token of chats whose KV comes from disk, beside computing it.

Usage:

    python -m benchmarks.disk_cache --model FILE --tokens 8000
    python -m benchmarks.disk_cache --shape qwen2.5-1.5b --tokens 8000
    python -m benchmarks.disk_cache --model FILE --tokens 500 --chats 100 --held 5

With one chat, every repetition is a new engine, as after a restart, and its files have left the page cache.
With several chats, one engine serves them in turn, twice; its caches hold a few chats, and the second round
reads the others. KV is in a temporary folder. Prints figures, asserts nothing.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine import setup

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def first_token_s(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Return the time to the first token, and the number of cached tokens."""
    prepared = engine.prepare(prompt, ONE_TOKEN)
    begun_s = time.perf_counter()
    engine.add("chat", prepared)
    while not (outputs := engine.step()):
        pass
    return time.perf_counter() - begun_s, outputs[0].num_cached_tokens


def prompts(count: int, tokens: int) -> list[list[int]]:
    made = random.Random(1)
    return [[made.randrange(256) for _ in range(tokens)] for _ in range(count)]


def drop_pages(folder: Path) -> int:
    """Drop the files' pages from memory; return the number of bytes."""
    os.sync()
    num_bytes = 0
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            num_bytes += path.stat().st_size
    return num_bytes


@contextmanager
def engine(options: argparse.Namespace, held: int) -> Iterator[Engine]:
    room = held * (options.tokens + 16)
    with Engine.from_pretrained(
        options.model,
        shape=options.shape,
        policy=options.policy,
        gpu_cache_tokens=room // 2 if options.policy == "auto" and held > 1 else room,
        cpu_cache_tokens=room // 2 if options.policy == "auto" and held > 1 else 16,
        cpu_cache_dtype=options.cpu_cache_dtype,
        disk_cache_gib=options.gib,
        max_batch_requests=8,
    ) as made:
        yield made


def restart(options: argparse.Namespace, folder: Path) -> None:
    (prompt,) = prompts(1, options.tokens)
    with engine(options, 1) as made:
        computed_s, _ = first_token_s(made, prompt)
        print(f"computed: {computed_s:.2f} s, {options.tokens / computed_s:.0f} tokens/s", flush=True)
        begun_s = time.perf_counter()
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"written at the end: {num_bytes / 1e6:.0f} MB in {time.perf_counter() - begun_s:.2f} s")
    for is_cold in [True] * options.repeat + [False] * options.repeat:
        if is_cold:
            drop_pages(folder)
        with engine(options, 1) as made:
            taken_s, cached = first_token_s(made, prompt)
        where = "disk" if is_cold else "page cache"
        print(
            f"from {where}: {taken_s:.3f} s, {cached} tokens cached, {taken_s / computed_s:.1%}", flush=True
        )


def in_turn(options: argparse.Namespace) -> None:
    chats = prompts(options.chats, options.tokens)
    with engine(options, options.held) as made:
        for number in (1, 2):
            taken = [first_token_s(made, chat) for chat in chats]
            seconds = [each for each, _ in taken]
            print(
                f"round {number}: mean {statistics.mean(seconds):.3f} s, median "
                f"{statistics.median(seconds):.3f} s, longest {max(seconds):.3f} s, "
                f"{sum(cached for _, cached in taken)} tokens cached",
                flush=True,
            )
        print(made.stats().disk)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--shape")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--cpu-cache-dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=8000, help="of a prompt")
    parser.add_argument("--chats", type=int, default=1)
    parser.add_argument("--held", type=int, default=5, help="chats that the caches hold")
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        setup.cache_folder = lambda name: Path(folder, name)
        if options.chats == 1:
            restart(options, Path(folder))
        else:
            in_turn(options)


if __name__ == "__main__":
    main()
