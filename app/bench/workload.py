"""The requests to the engine, and one run."""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from neo_desktop.engine.batch import SampledToken
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.errors import ContextLengthError
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.simulation.workload import WorkloadRequest

TOP_LOGPROBS = 5
OUT_OF_TIME = "out of time"

# By how much two tokens' log-probabilities may differ for one to be taken for the other: a few units in the
# last place of a logit of 16 to 32.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.8}

Answer = tuple[SampledToken, ...]  # with TOP_LOGPROBS log-probabilities each


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with random tokens: speed does not depend on them."""

    requests: tuple[WorkloadRequest, ...]
    num_left_out: int = 0  # longer than the context, or than a place of some policy

    def prompts(self, turn: int, vocab_size: int) -> list[list[int]]:
        """Make prompts: others for each turn."""
        rng = random.Random(turn)
        return [rng.choices(range(vocab_size), k=request.prompt_tokens) for request in self.requests]

    def params(self, logprobs: int | None = None) -> list[SamplingParams]:
        """Return greedy settings, each with its request's length."""
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


@dataclass(slots=True)
class Record:
    """One request's life, in milliseconds of one clock. A chunk is what one iteration brought."""

    arrival_ms: float  # when it was due
    answer: list[SampledToken] = field(default_factory=list)
    chunks_ms: list[float] = field(default_factory=list)
    error: str = ""  # reason for a missing or incomplete answer

    @property
    def ttft_ms(self) -> float:
        """Time to first token, waiting included; of a request with a token."""
        return self.chunks_ms[0] - self.arrival_ms

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first; None for one token."""
        gaps = len(self.answer) - 1
        return (self.chunks_ms[-1] - self.chunks_ms[0]) / gaps if gaps > 0 else None

    @property
    def itl_ms(self) -> list[float]:
        """Inter-token latencies: the gaps between successive chunks."""
        return [later - earlier for earlier, later in pairwise(self.chunks_ms)]


@dataclass(frozen=True, slots=True)
class Run:
    seconds: float
    records: tuple[Record, ...]  # per request

    @property
    def answers(self) -> tuple[Answer, ...]:
        return tuple(tuple(record.answer) for record in self.records)

    @property
    def output_tokens(self) -> int:
        return sum(len(record.answer) for record in self.records)


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    progress: Callable[[float], None],
    arrivals_ms: Sequence[float] = (),
    drain_s: float = math.inf,
) -> Run:
    """Let an idle engine answer all prompts.

    Each request is sent when it is due, whether or not others have their answers: with a closed loop a slower
    engine would get less to do.

    Args:
        progress: gets the share of the tokens so far.
        arrivals_ms: rising; empty: all at once.
        drain_s: after the last arrival; what is open then is ended with an error.
    """
    records = [Record(arrival_ms) for arrival_ms in arrivals_ms or [0.0] * len(prompts)]
    expected = sum(each.max_tokens or 1 for each in params)
    end_ms = max((record.arrival_ms for record in records), default=0.0) + 1e3 * drain_s
    done = sent = 0
    started = time.perf_counter()
    try:
        while sent < len(records) or engine.has_work:
            now_ms = 1e3 * (time.perf_counter() - started)
            if now_ms > end_ms:
                break
            while sent < len(records) and records[sent].arrival_ms <= now_ms:
                try:
                    engine.add(str(sent), engine.prepare(prompts[sent], params[sent]))
                except ContextLengthError:
                    records[sent].error = "longer than the context"
                sent += 1
            if not engine.has_work and sent == len(records):
                break
            if not engine.has_work:
                time.sleep((records[sent].arrival_ms - now_ms) / 1e3)
                continue
            outputs = engine.step()
            now_ms = 1e3 * (time.perf_counter() - started)
            for output in outputs:
                record = records[int(output.request_id)]
                if output.tokens:
                    record.chunks_ms.append(now_ms)
                    record.answer += output.tokens
                done += len(output.tokens)
                record.error = output.error or ""
            progress(done / expected)
        seconds = time.perf_counter() - started
    finally:  # after Ctrl-C and out of time; otherwise nothing is left
        for index in range(len(prompts)):
            engine.abort(str(index))
    for record, each in zip(records, params, strict=True):
        if not record.error and len(record.answer) < (each.max_tokens or 1):
            record.error = OUT_OF_TIME
    return Run(seconds, tuple(records))


@dataclass(frozen=True, slots=True)
class Comparison:
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
        pairs = zip(answer, expected, strict=False)
        parting = next(((a, b) for a, b in pairs if a.token_id != b.token_id), None)
        if parting is None:
            identical += len(answer) == len(expected)
        else:
            near_ties += _is_near_tie(*parting, tolerance)
    return Comparison(identical, near_ties, len(answers) - identical - near_ties)


def _is_near_tie(token: SampledToken, expected: SampledToken, tolerance: float) -> bool:
    """True if both runs gave either token nearly the same probability."""
    for chosen, other in ((token, expected.token_id), (expected, token.token_id)):
        probabilities = {top.token_id: top.logprob for top in chosen.top_logprobs}
        if chosen.logprob is None or other not in probabilities:
            return False
        if chosen.logprob.logprob - probabilities[other] > tolerance:
            return False
    return True
