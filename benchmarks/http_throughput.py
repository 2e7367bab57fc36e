"""Cost of HTTP and server-sent events: many streams at once against the same requests offline.

    python -m benchmarks.http_throughput
    python -m benchmarks.http_throughput --shape llama-3.2-1b --output 32

The requests run with `Engine.generate` in one process, then as streams against a server in another. Prints
both speeds, their ratio and the time to the first token of a short chat beside the others. The client shares
the processor, so on few cores it slows the server.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time

import psutil

from scripts.server_process import connection, percentile, request, server

OFFLINE = """
import json, sys, time
from neo_desktop import Engine, SamplingParams
options, prompts, num_tokens = json.load(sys.stdin)
with Engine.from_pretrained(disk_cache_gib=0, **options) as engine:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
    engine.generate(prompts[:2], SamplingParams(max_tokens=2, ignore_eos=True))
    begun_s, cpu_s = time.perf_counter(), time.process_time()
    engine.generate([[token + 1 for token in prompt] for prompt in prompts], params)  # not in the cache
    print(time.perf_counter() - begun_s, time.process_time() - cpu_s)
"""


async def stream(port: int, prompt: list[int] | str, num_tokens: int, first_s: list[float]) -> None:
    """Run one request to its end; append the time to its first token, in seconds."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    begun_s = time.perf_counter()
    async with connection(port) as (reader, writer):
        writer.write(request("POST", "/v1/completions", body))
        await reader.readuntil(b"data: ")
        first_s.append(time.perf_counter() - begun_s)
        rest = b""
        while data := await reader.read(1 << 16):
            rest = rest[-100:] + data
        assert b"[DONE]" in rest, rest


async def run(port: int, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[float]]:
    """Run all requests at once; return their duration in seconds and the times to their first tokens."""
    first_s: list[float] = []
    begun_s = time.perf_counter()
    await asyncio.gather(*(stream(port, prompt, num_tokens, first_s) for prompt in prompts))
    return time.perf_counter() - begun_s, first_s


async def short_beside_long(port: int, prompts: list[list[int]], num_tokens: int) -> float:
    """Return the seconds to the first token of a short chat that arrives while the others stream."""
    ignored: list[float] = []
    long = [asyncio.create_task(stream(port, prompt, num_tokens, ignored)) for prompt in prompts[1:]]
    while len(ignored) < len(long):
        await asyncio.sleep(0.01)
    first_s: list[float] = []
    await stream(port, prompts[0][:16], 4, first_s)
    await asyncio.gather(*long)
    return first_s[0]


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and its children."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--shape", help="random weights instead of the built-in model")
    parser.add_argument("--policy", default="gpu-only")
    parser.add_argument("--engine-process", action=argparse.BooleanOptionalAction, help="as of the server")
    options = parser.parse_args()
    generator = random.Random(0)
    prompts = [[generator.randrange(3, 250) for _ in range(options.input)] for _ in range(options.streams)]
    room = options.streams * (options.input + options.output + 32)
    engine = {"policy": options.policy, "gpu_cache_tokens": room, "shape": options.shape}
    given = json.dumps([engine, prompts, options.output])
    offline = subprocess.run(
        [sys.executable, "-c", OFFLINE], input=given, capture_output=True, text=True, check=True
    )
    offline_s, offline_cpu_s = map(float, offline.stdout.split()[-2:])
    flags = ["--policy", options.policy, "--gpu-cache-tokens", str(room)]
    flags += ["--shape", options.shape] if options.shape else []
    if options.engine_process is not None:
        flags.append("--engine-process" if options.engine_process else "--no-engine-process")
    with server(*flags) as (process, port):
        asyncio.run(run(port, [[5] * 16] * 2, 2))
        cpu_s = cpu_seconds(process.pid)
        http_s, first_s = asyncio.run(run(port, prompts, options.output))
        cpu_s = cpu_seconds(process.pid) - cpu_s
        others = [[token + 2 for token in prompt] for prompt in prompts]
        short_s = asyncio.run(short_beside_long(port, others, options.output))
    num_tokens = options.streams * options.output
    print(f"{options.streams} streams, {options.input} tokens in, {options.output} out each")
    print(f"offline {num_tokens / offline_s:,.0f} tokens/s, HTTP {num_tokens / http_s:,.0f} tokens/s")
    print(f"HTTP reaches {offline_s / http_s:.0%} of offline")
    print(f"processor time of the server: {cpu_s:.1f} s, offline {offline_cpu_s:.1f} s")
    firsts = f"p50 {percentile(first_s, 0.5):.2f}, p99 {percentile(first_s, 0.99):.2f} s"
    print(f"first token, all at once: {firsts}; of a short one beside {options.streams - 1}: {short_s:.2f} s")


if __name__ == "__main__":
    main()
