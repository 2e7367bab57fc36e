"""What is asked of the engine, under which policies; and one run: all requests at once."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from neo_desktop.engine.batch import SampledToken
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.simulation.workload import WorkloadRequest
from neo_desktop.engine.stats import EngineStats

TOP_LOGPROBS = 5

# By how much two tokens' log-probabilities may differ for one to be taken for the other: a few units in the
# last place of a logit of 16 to 32.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.8}

Answer = tuple[SampledToken, ...]  # with TOP_LOGPROBS log-probabilities each


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths of requests that every policy can serve; tokens are random, speed does not depend on them."""

    requests: tuple[WorkloadRequest, ...]
    num_left_out: int  # longer than the context, or than a place of some policy

    def prompts(self, seed: int, turn: int, vocab_size: int) -> list[list[int]]:
        """Make prompts: the same for a seed and turn, others for each turn."""
        rng = random.Random(f"{seed}/{turn}")
        return [rng.choices(range(vocab_size), k=request.prompt_tokens) for request in self.requests]

    def params(self, logprobs: int | None = None) -> list[SamplingParams]:
        """Greedy, and as long as each request wants it."""
        counts = [request.output_tokens for request in self.requests]
        return [
            SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True, logprobs=logprobs) for n in counts
        ]


def fitting(requests: Sequence[WorkloadRequest], most_tokens: int) -> Workload:
    """Leave out those that have more tokens, prompt and answer together; MemoryError if none is left."""
    kept = tuple(request for request in requests if request.total_tokens <= most_tokens)
    if not kept:
        shortest = min(request.total_tokens for request in requests)
        raise MemoryError(
            f"the shortest request has {shortest} tokens, but {most_tokens} fit into the context and the "
            "smallest cache: ask for shorter ones"
        )
    return Workload(kept, len(requests) - len(kept))


@dataclass(frozen=True, slots=True)
class Run:
    """What a run brought."""

    seconds: float
    answers: tuple[Answer, ...]  # of each request
    ttft_ms: tuple[float, ...]  # of each request that got a token: from the start of the run
    tpot_ms: tuple[float, ...]  # of each with more than one: mean time between its tokens
    errors: tuple[str, ...]  # of those that the engine gave up
    before: EngineStats
    after: EngineStats

    @property
    def output_tokens(self) -> int:
        """Of all requests."""
        return sum(len(answer) for answer in self.answers)

    def counted(self, counter: str) -> float:
        """By how much one of the engine's counters rose."""
        rise: float = getattr(self.after, counter) - getattr(self.before, counter)
        return rise


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    progress: Callable[[float], None],
) -> Run:
    """Let an idle engine answer all prompts; `progress` gets the share of the tokens that are there."""
    before = engine.stats()
    answers: list[list[SampledToken]] = [[] for _ in prompts]
    first_s, last_s = [0.0] * len(prompts), [0.0] * len(prompts)
    errors: list[str] = []
    expected = sum(each.max_tokens or 1 for each in params)
    done = 0
    started = time.perf_counter()
    try:
        for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            engine.add(str(index), engine.prepare(prompt, each))
        while engine.has_work:
            outputs = engine.step()
            now_s = time.perf_counter() - started
            for output in outputs:
                index = int(output.request_id)
                if output.tokens:
                    last_s[index] = now_s
                    first_s[index] = first_s[index] or now_s
                answers[index] += output.tokens
                done += len(output.tokens)
                if output.error is not None:
                    errors.append(output.error)
            progress(done / expected)
        seconds = time.perf_counter() - started
    finally:  # after Ctrl-C; otherwise nothing is left
        for index in range(len(prompts)):
            engine.abort(str(index))
    times = zip(first_s, last_s, map(len, answers), strict=True)
    return Run(
        seconds=seconds,
        answers=tuple(map(tuple, answers)),
        ttft_ms=tuple(1e3 * first for first in first_s if first),
        tpot_ms=tuple(1e3 * (last - first) / (count - 1) for first, last, count in times if count > 1),
        errors=tuple(errors),
        before=before,
        after=engine.stats(),
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The answers of one policy beside those of another."""

    identical: int
    near_ties: int  # part where two tokens were nearly equally probable
    changed: int  # part elsewhere, or are of another length: a failure


def compare(answers: Sequence[Answer], reference: Sequence[Answer], tolerance: float) -> Comparison:
    """Set the answers to the same prompts side by side.

    Policies put the same requests into different batches, and matrix products round differently for different
    batch sizes. In 32 bits that never showed in a chosen token; in 16 bits two tokens of nearly the same
    probability may change places, and everything after them is another text. So, where two answers part, the
    tokens that they chose there must be nearly equally probable; otherwise the answer was changed.
    """
    identical = near_ties = 0
    for answer, expected in zip(answers, reference, strict=True):
        parting = next(
            (at for at, (a, b) in enumerate(zip(answer, expected, strict=False)) if a.token_id != b.token_id),
            None,
        )
        if parting is None:
            identical += len(answer) == len(expected)
        else:
            near_ties += _is_near_tie(answer[parting], expected[parting], tolerance)
    return Comparison(identical, near_ties, len(answers) - identical - near_ties)


def _is_near_tie(token: SampledToken, expected: SampledToken, tolerance: float) -> bool:
    """Whether both runs gave either token nearly the same probability."""
    for chosen, other in ((token, expected.token_id), (expected, token.token_id)):
        probabilities = {top.token_id: top.logprob for top in chosen.top_logprobs}
        if chosen.logprob is None or other not in probabilities:
            return False
        if chosen.logprob.logprob - probabilities[other] > tolerance:
            return False
    return True
