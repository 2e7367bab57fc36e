"""An engine whose steps are timed one by one: random prompts join, decode together, and leave."""

import random
import time
from dataclasses import dataclass
from functools import cache

from neo_desktop.engine.batch import IterationPlan, IterationResult
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.execute.executor import Wait
from neo_desktop.engine.predict.cost_model import ZERO
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.setup import EngineParts

POLICY = "gpu-only"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine."""

    plan: IterationPlan
    model_s: float  # in the model runner: model, attention, sampling
    seconds: float  # from the end of the step before

    @property
    def context_lens(self) -> list[int]:
        return [sequence.context_len for sequence in self.plan.sequences]


class Rig:
    """The engine with a model on its device."""

    def __init__(self, parts: EngineParts, context_tokens: int, seed: int = 0) -> None:
        self._context_tokens = context_tokens
        self._random = random.Random(seed)
        self._num_requests = 0
        self._engine = Engine.from_parts(parts, POLICY, cost_model=ZERO)
        self._last: tuple[IterationPlan, float] | None = None
        executor = self._engine.executor
        start = executor.start

        def timed(plan: IterationPlan) -> Wait:
            wait = start(plan)

            @cache
            def ended() -> IterationResult:
                result = wait()
                assert result.timing is not None
                self._last = plan, result.timing.total_ms / 1e3
                return result

            return ended

        executor.start = timed  # type: ignore[method-assign]

    def prefill(self) -> list[Step]:
        """Compute a new prompt alone, with its first token."""
        self._add("prompt", max_tokens=1)
        steps = []
        while self._engine.has_work:
            steps += self._step()
        return steps

    def decode(self, batch: int, count: int) -> list[Step]:
        """Admit requests up to this number; return `count` steps in which all decode.

        Raises:
            MemoryError: memory holds fewer.
        """
        while self._num_requests < batch:
            self._add(str(self._num_requests), max_tokens=None)
            self._num_requests += 1
        steps: list[Step] = []
        for _ in range(batch * self._context_tokens + count):  # a step computes one token at least
            steps += [
                step
                for step in self._step()
                if len(step.context_lens) == batch and all(s.is_decode for s in step.plan.sequences)
            ]
            if len(steps) > count:
                return steps[1:]
        raise MemoryError(f"{batch} requests do not decode together: the device is short of memory")

    def close(self) -> None:
        self._engine.close()

    def _add(self, request_id: str, max_tokens: int | None) -> None:
        prompt = [self._random.randrange(self._engine.config.vocab_size) for _ in range(self._context_tokens)]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._engine.add(request_id, self._engine.prepare(prompt, params))

    def _step(self) -> list[Step]:
        """Make a step; return nothing if the device had no memory for it."""
        self._last, start = None, time.perf_counter()
        for output in self._engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
        return [] if self._last is None else [Step(*self._last, time.perf_counter() - start)]
