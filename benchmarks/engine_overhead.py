"""The engine's own time per iteration, without the model: planning, bookkeeping, sampling, text.

The device waits for planning and bookkeeping. Deciding the next iteration, submitting the sampler's work and
text overlap the device. With a stop string (--stop) a token's text is made at once.

    python -m benchmarks.engine_overhead --requests 64 --context 400 8000

Scheduler, KV cache, detokenizer and sampler are real. A pause replaces the model; after it the processor's
caches hold less of the engine's data than in a tight loop (--pause-ms 0). Predictions are those for a desktop
from its datasheet. Except for `gpu-only`, three quarters of the KV fit the GPU-cache. The sampler's
vocabulary is small, because a larger one only adds computation on the device.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from neo_desktop.engine.batch import IterationPlan, IterationResult
from neo_desktop.engine.detokenizer import IncrementalText
from neo_desktop.engine.execute.layout import BatchMembers, GraphKey
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.loading import model_path
from neo_desktop.engine.options import BUILTIN
from neo_desktop.engine.request import Request
from neo_desktop.engine.sampler import sample
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.schedule.policies import get_policy
from neo_desktop.engine.schedule.scheduler import Scheduler, SchedulerLimits
from neo_desktop.engine.simulation.analytic import analytic_cost_model
from neo_desktop.engine.simulation.presets import GPUS, HOSTS
from neo_desktop.models.shapes import shape
from neo_desktop.models.tokenizer import Tokenizer

ITERATIONS = 200
OUTPUT_TOKENS = 1000  # per request; more than the run generates
VOCABULARY = 256
PARTS = ("plan", "its rows", "book")  # between two iterations
BESIDE = ("decide ahead", "sample", "text")


def make_scheduler(policy: str, num_requests: int, context: int, stop: Sequence[str]) -> Scheduler[Request]:
    """Return a scheduler with requests of random lengths around a mean."""
    rng = random.Random(0)
    lengths = [rng.randint(context // 2, context * 3 // 2) for _ in range(num_requests)]
    blocks = sum(-(-(length + OUTPUT_TOKENS) // BLOCK_SIZE) for length in lengths)
    blocks += num_requests**2  # left free by admission
    sizes = {KVTier.DEVICE: blocks if policy == "gpu-only" else blocks * 3 // 4, KVTier.HOST: blocks}
    chosen = get_policy(policy)
    scheduler: Scheduler[Request] = Scheduler(
        KVCache({tier: sizes.get(tier, 0) for tier in chosen.tiers}, BLOCK_SIZE),
        chosen,
        SchedulerLimits(8192, num_requests),
        analytic_cost_model(GPUS["rtx-4090"], HOSTS["ddr5-desktop"], shape("llama-3.2-3b"), torch.float16),
    )
    tokenizer = Tokenizer.from_pretrained(model_path(BUILTIN))
    for number, length in enumerate(lengths):
        scheduler.add(
            Request(
                str(number),
                tuple(rng.choices(range(VOCABULARY), k=length)),
                SamplingParams(max_tokens=OUTPUT_TOKENS),
                choice=0,
                seed=number,
                arrival=number,
                max_context_tokens=length + OUTPUT_TOKENS,
                eos_token_ids=(),
                text=IncrementalText(tokenizer.decode_stream(), stop),
            )
        )
    return scheduler


class Clock:
    """Durations of an iteration's parts, in ms."""

    def __init__(self) -> None:
        self.times_ms: dict[str, float] = {}
        self._last_s = time.perf_counter()

    def end(self, part: str) -> None:
        """Add the time since the last part to this one."""
        now = time.perf_counter()
        self.times_ms[part], self._last_s = (now - self._last_s) * 1e3, now


def step(
    scheduler: Scheduler[Request], logits: Tensor, pause_ms: float
) -> tuple[IterationPlan, dict[str, float]]:
    """Run an iteration; return its plan and the durations of PARTS and BESIDE, in ms."""
    clock = Clock()
    plan = scheduler.schedule()
    assert plan is not None
    clock.end("plan")
    members = [BatchMembers.of(sub_batch, MEASURED_TIERS) for sub_batch in plan.sub_batches]
    GraphKey.of(members, MEASURED_TIERS, np.empty(0, np.int32), has_copies=bool(plan.copies)).rounded()
    clock.end("its rows")
    scheduler.look_ahead()
    clock.end("decide ahead")
    time.sleep(pause_ms / 1e3)
    clock.end("pause")
    inputs = {each.request_id: each.sampling for each in plan.sequences if each.sampling is not None}
    tokens = sample(logits[: len(inputs)], list(inputs.values()))
    by_request = {name: token for name, token in zip(inputs, tokens, strict=True) if token is not None}
    clock.end("sample")
    gained = scheduler.update(IterationResult(by_request, {}))
    clock.end("book")
    for request in gained:
        request.take_output()
    clock.end("text")
    return plan, clock.times_ms


def measure(policy: str, num_requests: int, context: int, pause_ms: float, stop: Sequence[str]) -> None:
    """Decode as many requests as fit; print the medians."""
    scheduler = make_scheduler(policy, num_requests, context, stop)
    logits = torch.randn(num_requests, VOCABULARY, generator=torch.Generator().manual_seed(0))
    while any(len(sequence.token_ids) > 1 for sequence in step(scheduler, logits, 0)[0].sequences):
        pass
    decodes = scheduler.counters.num_output_tokens, scheduler.counters.num_cpu_decodes
    times = [step(scheduler, logits, pause_ms)[1] for _ in range(ITERATIONS)]
    batch = (scheduler.counters.num_output_tokens - decodes[0]) / ITERATIONS
    on_cpu = (scheduler.counters.num_cpu_decodes - decodes[1]) / ITERATIONS
    total = statistics.median(sum(each[part] for part in PARTS) for each in times)
    parts, beside = (
        "".join(f"{statistics.median(each[part] for each in times):13.3f}" for part in group)
        for group in (PARTS, BESIDE)
    )
    print(f"{policy:10}{context:8}{batch:8.0f}{on_cpu:8.0f}{parts}{total:10.3f} |{beside}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", type=int, nargs="+", default=[400, 8000], help="tokens, mean")
    parser.add_argument("--policy", nargs="+", default=["gpu-only", "auto"])
    parser.add_argument("--pause-ms", type=float, default=8.0, help="in place of the model")
    parser.add_argument("--stop", nargs="+", default=[], help="stop strings of all requests")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts, beside = ("".join(f"{part:>13}" for part in group) for group in (PARTS, BESIDE))
    print(f"{'policy':10}{'context':>8}{'batch':>8}{'on CPU':>8}{parts}{'ms':>10} |{beside}")
    for policy in options.policy:
        for context in options.context:
            measure(policy, options.requests, context, options.pause_ms, options.stop)


if __name__ == "__main__":
    main()
