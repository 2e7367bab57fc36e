"""Requests with prompts: lengths from a trace or made up; tokens at random, speed does not depend on them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from neo_desktop.app.bench.throughput.options import LENGTHS, ThroughputOptions
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.simulation.workload import WorkloadRequest, load_trace, synthetic

MOST_REQUESTS = 256  # as many as run at the same time at most


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths of requests that every policy can serve."""

    requests: tuple[WorkloadRequest, ...]
    num_left_out: int  # longer than the context, or than a place of some policy

    def prompts(self, seed: int, turn: int, vocab_size: int) -> list[list[int]]:
        """Make prompts: the same for a seed and turn, others for each turn."""
        rng = random.Random(f"{seed}/{turn}")
        return [rng.choices(range(vocab_size), k=request.prompt_tokens) for request in self.requests]

    def params(self, logprobs: int | None = None) -> list[SamplingParams]:
        """Greedy, and as long as each request wants it."""
        return [
            SamplingParams(
                max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs
            )
            for request in self.requests
        ]


def lengths(options: ThroughputOptions, device: str) -> list[WorkloadRequest]:
    """Return as many requests as could be asked for; raises what `load_trace` raises.

    Args:
        device: "cpu" or "cuda", for the lengths of requests that are made up.
    """
    count = options.num_requests or MOST_REQUESTS
    if options.trace is not None:
        return load_trace(options.trace)[:count]
    input_tokens, output_tokens = LENGTHS[device]
    return synthetic(
        count, options.input_tokens or input_tokens, options.output_tokens or output_tokens, options.seed
    )


def fitting(requests: Sequence[WorkloadRequest], most_tokens: int) -> Workload:
    """Leave out those that have more tokens, prompt and answer together.

    Raises:
        MemoryError: none is left.
    """
    kept = tuple(request for request in requests if request.total_tokens <= most_tokens)
    if not kept:
        shortest = min(request.total_tokens for request in requests)
        raise MemoryError(
            f"the shortest request has {shortest} tokens, but {most_tokens} fit into the context and the "
            "smallest cache: ask for shorter ones"
        )
    return Workload(kept, len(requests) - len(kept))
