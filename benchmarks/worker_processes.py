"""Real attention workers, each a process on this computer: throughput by their number.

    python -m benchmarks.worker_processes  # two cores: one per worker
    python -m benchmarks.worker_processes --token-us 20 --layer-ms 10 --workers 1 2 4

Decodes with long contexts run through the engine's own model runner, protocol and workers. The model is
small, so attention dominates. All KV is on the workers, evenly.

`--token-us` throttles attention: it is computed, and then ends when the stated time per token of context has
passed. `--layer-ms` throttles the device's stages of a layer in the same way. So more workers than cores can
show the pipeline's loss; the times are not those of faster computers. `--in-turn` lets a worker answer before
it gets the next rows. Other programs only add to iteration times, so the fastest iterations are most
meaningful.
"""

import argparse
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from neo_desktop import native
from neo_desktop.engine.batch import IterationPlan, SamplingInput, ScheduledSequence, SubBatch
from neo_desktop.engine.execute import lanes
from neo_desktop.engine.execute.backend import ThreadBackend
from neo_desktop.engine.execute.lane import HostTask, Signal
from neo_desktop.engine.execute.lanes import WorkerLane
from neo_desktop.engine.execute.layout import Capacity
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.kv.host_layer import HostLayer
from neo_desktop.engine.kv.layer import DecodeRows
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.remote.link import Address, Trust, WorkerLink
from neo_desktop.engine.remote.pool import RemotePool
from neo_desktop.engine.remote.shape import AttentionShape
from neo_desktop.engine.remote.worker import AttentionWorker
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.operators import Store
from neo_desktop.models.registry import random_model
from neo_desktop.models.shapes import shape
from neo_desktop.models.stages import Stages, State

SECRET = "NEO_DESKTOP_SCRIPT_SECRET"
DTYPE = torch.bfloat16
PARAMS = SamplingParams(temperature=0.0)
CPU = torch.device("cpu")


def throttled(work: Callable[[], object], seconds: float) -> None:
    """Run work that ends after this time."""
    end = time.perf_counter() + seconds
    work()
    time.sleep(max(end - time.perf_counter(), 0.0))


class ThrottledStages(Stages):
    """Stages between attention that take a stated time for any number of rows."""

    layer_s = 0.0

    def advance(self, index: int, state: State, store: Store | None = None) -> None:
        throttled(partial(super().advance, index, state, store), self.layer_s)


def config_of(num_layers: int) -> ModelConfig:
    """Return a config with few weights, and KV of 8 heads of 64: 2 KB per token and layer."""
    return replace(
        shape("tiny"),
        num_layers=num_layers,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        layer_windows=(None,) * num_layers,
        max_context_tokens=1 << 15,
        dtype=DTYPE,
    )


def serve(token_us: float) -> None:
    """Run a worker: one thread, attention as slow as stated."""
    native.set_default_num_threads(1)
    if token_us:
        decode = HostLayer.decode

        def slow(self: HostLayer, rows: DecodeRows) -> None:
            throttled(partial(decode, self, rows), int(rows.context_lens.sum()) * token_us / 1e6)

        HostLayer.decode = slow  # type: ignore[method-assign]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        AttentionWorker(listener, os.environ[SECRET].encode(), 1 << 34).serve()


@contextmanager
def worker_process(cpu: int, token_us: float, secret: str) -> Iterator[Address]:
    """Run a worker on a CPU; yield its address."""
    command = (sys.executable, "-m", "benchmarks.worker_processes", "--serve", "--token-us", str(token_us))
    environment = os.environ | {SECRET: secret, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            os.sched_setaffinity(process.pid, {cpu})
            assert process.stdout is not None
            yield Address("127.0.0.1", int(process.stdout.readline()))
        finally:
            process.kill()


class InTurn(WorkerLane):
    """A lane that sends rows after the previous answers."""

    _before: Sequence[Signal] = ()

    def submit_step(self, task: HostTask, turn: int, after: Sequence[Signal] = ()) -> Signal:
        answered = super().submit_step(task, turn, (*after, *self._before))
        self._before = (answered,)
        return answered


@dataclass(frozen=True)
class Case:
    """Configuration of a measurement."""

    requests: int
    context: int
    iterations: int
    layer_ms: float

    def plan(self, num_workers: int) -> IterationPlan:
        """Return decodes in two sub-batches, each on all workers."""
        blocks = self.context // BLOCK_SIZE
        sequences = []
        for number in range(self.requests):
            tier, at = KVTier.worker(number % num_workers + 1), number // num_workers
            table = IntArray(range(at * blocks, (at + 1) * blocks)).view()
            no_tokens = IntArray().view()
            sampling = SamplingInput(PARAMS, 0, 0, self.context, no_tokens, no_tokens)
            sequences.append(
                ScheduledSequence(str(number), (number % 250,), self.context - 1, tier, table, sampling)
            )
        half = len(sequences) // 2
        return IterationPlan((SubBatch(tuple(sequences[:half])), SubBatch(tuple(sequences[half:]))))

    def milliseconds(self, model: Decoder, addresses: Sequence[Address], trust: Trust) -> list[float]:
        """Return iteration times."""
        config, pools = model.config, {}
        num_blocks = -(-self.requests // len(addresses)) * self.context // BLOCK_SIZE
        for number, address in enumerate(addresses, 1):
            tier = KVTier.worker(number)
            link = WorkerLink(tier.name, partial(_same, address), trust)
            link.open(AttentionShape.of(config, BLOCK_SIZE, DTYPE), None, num_blocks)
            pools[tier] = RemotePool(tier, config, BLOCK_SIZE, DTYPE, link)
            rows = torch.randn(2, 4096, config.num_kv_heads, config.head_dim, dtype=DTYPE)
            for layer in range(config.num_layers):
                for begin in range(0, link.num_blocks * BLOCK_SIZE, 4096):
                    slots = torch.arange(begin, min(begin + 4096, link.num_blocks * BLOCK_SIZE))
                    link.store(layer, slots, rows[0, : len(slots)], rows[1, : len(slots)])
        stages = ThrottledStages(model)
        stages.layer_s = self.layer_ms / 1e3
        capacity = Capacity.of(256, self.requests, config.max_context_tokens, BLOCK_SIZE)
        executor = ModelRunner(stages, KVStorage(pools), capacity, ThreadBackend(None))
        plan, found = self.plan(len(addresses)), []
        try:
            for _ in range(self.iterations + 2):
                begin_s = time.perf_counter()
                executor.execute(plan)
                found.append(1e3 * (time.perf_counter() - begin_s))
        finally:
            executor.close()
            for pool in pools.values():
                pool.link.close()
        return found[2:]


def _same(address: Address) -> Address:
    return address


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--context", type=int, default=2048, help="tokens of each")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--token-us", type=float, default=0.0, help="of attention, per token of context")
    parser.add_argument("--layer-ms", type=float, default=0.0, help="of the device, for a layer's stages")
    parser.add_argument("--in-turn", action="store_true", help="rows are not sent ahead")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.token_us)
        return
    if options.in_turn:
        lanes.WorkerLane = InTurn  # type: ignore[misc]
    torch.set_num_threads(1)
    case = Case(options.requests, options.context, options.iterations, options.layer_ms)
    model = random_model(config_of(options.layers), dtype=DTYPE, device=CPU)
    secret = secrets.token_hex(16)
    trust = Trust(secret.encode(), timeout_s=60.0)
    cpus = sorted(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    print(
        f"{case.requests} requests of {case.context} tokens, {options.layers} layers, {len(cpus)} CPUs, "
        f"load {load:.1f} before; attention {options.token_us:g} us per token at least, "
        f"device {options.layer_ms:g} ms per stage\n"
        "| workers | iteration, ms: fastest | median | tokens/s of that | efficiency | by the median |\n"
        + "|---" * 6
        + "|",
        flush=True,
    )
    ones: list[float] = []  # duration with one worker, measured or calculated
    for count in options.workers:
        with ExitStack() as stack:
            addresses = [
                stack.enter_context(worker_process(cpus[-1 - n % len(cpus)], options.token_us, secret))
                for n in range(count)
            ]
            found = case.milliseconds(model, addresses, trust)
        times = min(found), statistics.median(found)
        ones = ones or [ms * count for ms in times]
        efficiencies = [one / ms / count for one, ms in zip(ones, times, strict=True)]
        print(
            f"| {count} | {times[0]:.1f} | {times[1]:.1f} | {case.requests / times[0] * 1e3:,.0f} "
            f"| {efficiencies[0]:.0%} | {efficiencies[1]:.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
