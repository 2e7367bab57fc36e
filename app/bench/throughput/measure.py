"""One run: all requests at once, until the last has its answer."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from neo_desktop.app.bench.throughput.answers import Answer
from neo_desktop.engine.batch import SampledToken
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Run:
    """What a run brought."""

    seconds: float
    answers: tuple[Answer, ...]  # of each request
    ttft_ms: tuple[float, ...]  # of each request that got a token: from the start of the run
    tpot_ms: tuple[float, ...]  # of each with more than one: mean time between its tokens
    errors: tuple[str, ...]  # of those that the engine gave up
    num_iterations: int
    num_cpu_decodes: int
    num_double_iterations: int
    num_preemptions: int
    num_moves: int
    outside_s: float  # between iterations, when nothing was computed

    @property
    def output_tokens(self) -> int:
        """Of all requests."""
        return sum(len(answer) for answer in self.answers)


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
    after = engine.stats()
    return Run(
        seconds=seconds,
        answers=tuple(map(tuple, answers)),
        ttft_ms=tuple(1e3 * first for first in first_s if first),
        tpot_ms=tuple(
            1e3 * (last - first) / (len(answer) - 1)
            for first, last, answer in zip(first_s, last_s, answers, strict=True)
            if len(answer) > 1
        ),
        errors=tuple(errors),
        num_iterations=after.num_iterations - before.num_iterations,
        num_cpu_decodes=after.num_cpu_decodes - before.num_cpu_decodes,
        num_double_iterations=after.num_double_iterations - before.num_double_iterations,
        num_preemptions=after.num_preemptions - before.num_preemptions,
        num_moves=after.num_moves - before.num_moves,
        outside_s=after.outside_s - before.outside_s,
    )
