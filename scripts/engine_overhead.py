"""What the engine itself takes of an iteration, beside the model: planning, text, bookkeeping, sampling.

    python -m scripts.engine_overhead --requests 64 --context 400 8000

Scheduler, KV cache, detokenizer and sampler are the real ones; a pause stands in for the model, after which
the processor's caches hold less of the engine's data than in a tight loop (--pause-ms 0). Predictions are
those for a desktop from its datasheet, and but for `gpu-only` three quarters of the KV fit the GPU-cache. The
sampler gets a small vocabulary: what more of it takes is computation on the device.
"""

import argparse
import random
import statistics
import time
from itertools import pairwise
from types import SimpleNamespace

import torch
from torch import Tensor

from neo_desktop.engine.batch import IterationPlan, IterationResult
from neo_desktop.engine.detokenizer import IncrementalText
from neo_desktop.engine.execute.attention import place_batches
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.loading import BUILTIN, model_folder
from neo_desktop.engine.placement import Place, get_policy
from neo_desktop.engine.profiling.budget import BLOCK_SIZE
from neo_desktop.engine.request import Request
from neo_desktop.engine.sampler import sample
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.schedule.scheduler import Scheduler, SchedulerLimits
from neo_desktop.engine.simulation.analytic import analytic_cost_model
from neo_desktop.engine.simulation.presets import GPUS, HOSTS
from neo_desktop.models.shapes import shape
from neo_desktop.models.tokenizer import Tokenizer

ITERATIONS = 200
OUTPUT_TOKENS = 1000  # of a request; more than it gets here
VOCABULARY = 256
PARTS = ("plan", "its tensors", "sample", "book")


def make_scheduler(policy: str, num_requests: int, context: int) -> Scheduler:
    """Return a scheduler with requests of random lengths around a mean."""
    rng = random.Random(0)
    lengths = [rng.randint(context // 2, context * 3 // 2) for _ in range(num_requests)]
    blocks = sum(-(-(length + OUTPUT_TOKENS) // BLOCK_SIZE) for length in lengths)
    blocks += num_requests**2  # what admission leaves free
    sizes = {Place.DEVICE: blocks if policy == "gpu-only" else blocks * 3 // 4, Place.HOST: blocks}
    chosen = get_policy(policy)
    scheduler = Scheduler(
        KVCache({place: sizes[place] for place in chosen.places}, BLOCK_SIZE),
        chosen,
        SchedulerLimits(8192, num_requests),
        analytic_cost_model(GPUS["rtx-4090"], HOSTS["ddr5-desktop"], shape("llama-3.2-3b"), torch.float16),
    )
    tokenizer = Tokenizer.from_pretrained(model_folder(BUILTIN))
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
                text=IncrementalText(tokenizer.decode_stream(), ("\n\n",)),
            )
        )
    return scheduler


def step(scheduler: Scheduler, logits: Tensor, pause_ms: float) -> tuple[IterationPlan, list[float]]:
    """Make an iteration; return its plan and how long each of PARTS took, in ms."""
    pool = SimpleNamespace(block_size=BLOCK_SIZE, device=logits.device)
    times = [time.perf_counter()]
    plan = scheduler.schedule()
    times.append(time.perf_counter())
    for sub_batch in plan.sub_batches:
        place_batches(sub_batch, dict.fromkeys(Place, pool))
    times.append(time.perf_counter())
    time.sleep(pause_ms / 1e3)
    paused = time.perf_counter()
    sampled = [sequence for sequence in plan.sequences if sequence.sampling is not None]
    tokens = sample(logits[: len(sampled)], [sequence.sampling for sequence in sampled])
    by_request = {sequence.request_id: token for sequence, token in zip(sampled, tokens, strict=True)}
    times.append(times[-1] + time.perf_counter() - paused)
    booked = time.perf_counter()
    for request in scheduler.update(IterationResult(by_request, {})):
        request.take_output()
    times.append(times[-1] + time.perf_counter() - booked)
    return plan, [(end - start) * 1e3 for start, end in pairwise(times)]


def measure(policy: str, num_requests: int, context: int, pause_ms: float) -> None:
    """Let as many requests decode as find room, and print the medians."""
    scheduler = make_scheduler(policy, num_requests, context)
    logits = torch.randn(num_requests, VOCABULARY, generator=torch.Generator().manual_seed(0))
    while any(len(sequence.token_ids) > 1 for sequence in step(scheduler, logits, 0)[0].sequences):
        pass
    decodes = scheduler.counters.num_output_tokens, scheduler.counters.num_cpu_decodes
    times = [step(scheduler, logits, pause_ms)[1] for _ in range(ITERATIONS)]
    batch = (scheduler.counters.num_output_tokens - decodes[0]) / ITERATIONS
    on_cpu = (scheduler.counters.num_cpu_decodes - decodes[1]) / ITERATIONS
    total = statistics.median(map(sum, times))
    parts = "".join(f"{statistics.median(part):12.3f}" for part in zip(*times, strict=True))
    print(f"{policy:10}{context:8}{batch:8.0f}{on_cpu:8.0f}{parts}{total:10.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", type=int, nargs="+", default=[400, 8000], help="tokens, mean")
    parser.add_argument("--policy", nargs="+", default=["gpu-only", "auto"])
    parser.add_argument("--pause-ms", type=float, default=8.0, help="in place of the model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'policy':10}{'context':>8}{'batch':>8}{'on CPU':>8}{''.join(f'{p:>12}' for p in PARTS)}{'ms':>10}"
    )
    for policy in options.policy:
        for context in options.context:
            measure(policy, options.requests, context, options.pause_ms)


if __name__ == "__main__":
    main()
