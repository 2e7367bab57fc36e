"""An engine whose iterations are timed one by one: requests join, decode together, and leave."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from neo_desktop.engine.batch import IterationPlan, IterationResult
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.execute.build import build_executor
from neo_desktop.engine.execute.executor import Executor, Wait
from neo_desktop.engine.execute.timeline import Timeline, busy_ns
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.schedule.policies import get_policy
from neo_desktop.engine.schedule.scheduler import Scheduler
from neo_desktop.engine.setup import EngineParts
from neo_desktop.models.config import ModelConfig

POLICY = "gpu-only"
_ADVICE = "the device is short of memory; close other programs or take smaller batches"


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one iteration."""

    nbytes: int  # weights once, and the requests' KV
    operations: int  # a multiplication and an addition per weight and token; attention not counted

    def memory_s(self, read_gb_per_s: float) -> float:
        """Return the seconds to read it."""
        return self.nbytes / read_gb_per_s / 1e9

    def arithmetic_s(self, gflop_per_s: float) -> float:
        """Return the seconds to compute it."""
        return self.operations / gflop_per_s / 1e9


def iteration_work(
    config: ModelConfig, dtype: torch.dtype, context_lens: list[int], new_tokens: int, sampled: int
) -> Work:
    """Return the least work of an iteration.

    Args:
        context_lens: tokens per request, new ones included; their KV is read once.
        new_tokens: sum over the requests, through the linear stages.
        sampled: requests that get a token, through the output head.
    """
    head = config.vocab_size * config.hidden_size
    tables = head if config.tie_word_embeddings else 2 * head
    layers = config.num_parameters - tables
    layer_kv_bytes = config.kv_bytes_per_token(dtype) // config.num_layers
    kv_tokens = sum(
        min(length, window or length) for length in context_lens for window in config.layer_windows
    )
    weights = layers + (head if sampled else 0)
    return Work(
        nbytes=weights * dtype.itemsize + kv_tokens * layer_kv_bytes,
        operations=2 * (layers * new_tokens + head * sampled),
    )


@dataclass(frozen=True, slots=True)
class Iteration:
    """One step of the engine."""

    batch: int  # number of requests
    context_tokens: int  # sum over the requests
    new_tokens: int
    work: Work
    model_s: float  # in the model runner: model, attention, sampling
    step_s: float  # whole step, from the end of the step before

    @property
    def is_decode(self) -> bool:
        """True if every request computed one token."""
        return self.new_tokens == self.batch


class Launcher(Executor):
    """An executor that keeps the last plan and its time, and can record a timeline temporarily."""

    def __init__(self, parts: EngineParts) -> None:
        self._setup = parts
        self._executor = self._build(None)
        self._under_way: Wait | None = None
        self.last: tuple[IterationPlan, float] | None = None

    def start(self, plan: IterationPlan) -> Wait:
        """Start a plan."""
        wait_for_result = cache(self._executor.start(plan))  # the executor may be exchanged before

        def wait() -> IterationResult:
            self.last = None
            result = wait_for_result()
            if result.timing is not None:
                self.last = plan, result.timing.total_ms / 1e3
            return result

        self._under_way = wait_for_result
        return wait

    @contextmanager
    def traced(self) -> Iterator[Timeline]:
        """Record the iterations within the block."""
        timeline = Timeline()
        self._exchange(timeline)
        try:
            yield timeline
        finally:
            self._exchange(None)

    def close(self) -> None:
        """Close the executor."""
        self._executor.close()

    def _exchange(self, timeline: Timeline | None) -> None:
        """Continue with another executor; memory holds one."""
        if self._under_way is not None:
            self._under_way()
        self._executor.close()
        del self._executor
        self._executor = self._build(timeline)

    def _build(self, timeline: Timeline | None) -> Executor:
        parts = self._setup
        limits = parts.limits
        return build_executor(
            parts.model.decoder,
            parts.storage,
            limits.max_batch_tokens,
            limits.max_batch_requests,
            timeline,
            parts.model.streams,
        )


class Rig:
    """The engine with a model on its device; prompts are random and the same in every round.

    After the first round their KV is cached; only the fresh prompt of `prefill` is recomputed.
    """

    def __init__(self, parts: EngineParts, context_tokens: int, seed: int) -> None:
        self._decoder = parts.model.decoder
        self._context_tokens = context_tokens
        self._random = random.Random(seed)
        self._prompts: list[list[int]] = []
        self._num_requests = 0  # running requests
        self._last_step_s: float | None = None  # end of the last step, if an iteration is running
        self._launcher = Launcher(parts)
        kv_cache = KVCache(parts.num_blocks, BLOCK_SIZE)
        scheduler = Scheduler(kv_cache, get_policy(POLICY), parts.limits)
        self._engine = Engine(parts.model, scheduler, kv_cache, self._launcher, POLICY)

    def prefill(self) -> list[Iteration]:
        """Compute a new prompt alone; return its iterations."""
        self._add("prefill", self._prompt(), max_tokens=1)
        iterations = []
        while self._engine.has_work:
            iterations += self._step()
        return iterations

    def join(self, batch: int) -> None:
        """Admit requests up to this number and compute their prompts; raises MemoryError if that fails."""
        while self._num_requests < batch:
            if self._num_requests == len(self._prompts):
                self._prompts.append(self._prompt())
            self._add(str(self._num_requests), self._prompts[self._num_requests], max_tokens=None)
            self._num_requests += 1
        for _ in range(batch * self._context_tokens + 1):  # a step computes one token at least
            if any(each.is_decode and each.batch == batch for each in self._step()):
                return
        raise MemoryError(f"{batch} requests could not be brought to decode together: {_ADVICE}")

    def decode(self, count: int) -> list[Iteration]:
        """Return `count` iterations in which all requests decode; raises MemoryError if some cannot."""
        iterations: list[Iteration] = []
        while len(iterations) < count:
            iterations += self._step()
        if any(each.batch != self._num_requests or not each.is_decode for each in iterations):
            raise MemoryError(f"some of {self._num_requests} requests had to wait: {_ADVICE}")
        return iterations

    def idle_share(self, count: int) -> float:
        """Decode for `count` iterations; return the share of time in which the device was idle."""
        with self._launcher.traced() as timeline:
            iterations = self.decode(count)
            busy_s = busy_ns(timeline.spans, "device") / 1e9
        return max(1 - busy_s / sum(each.model_s for each in iterations), 0.0)

    def leave(self) -> None:
        """End all requests."""
        for request in range(self._num_requests):
            self._engine.abort(str(request))
        self._num_requests = 0
        while self._engine.has_work:  # the running iteration
            self._step()

    def close(self) -> None:
        """End the engine and free its memory."""
        self._engine.close()

    def _prompt(self) -> list[int]:
        vocab_size = self._engine.config.vocab_size
        return [self._random.randrange(vocab_size) for _ in range(self._context_tokens)]

    def _add(self, request_id: str, prompt: list[int], max_tokens: int | None) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._engine.add(request_id, self._engine.prepare(prompt, params))

    def _step(self) -> list[Iteration]:
        """Make a step; return nothing if the device had no memory for it.

        Raises:
            RuntimeError: the engine gave up a request.
        """
        # A running iteration began in the step before: steps then follow each other without a gap.
        start = time.perf_counter() if self._last_step_s is None else self._last_step_s
        outputs = self._engine.step()
        now = time.perf_counter()
        step_s = now - start
        self._last_step_s = now if self._engine.has_work else None
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
        if self._launcher.last is None:
            return []
        plan, model_s = self._launcher.last
        sequences = list(plan.sequences)
        context_lens = [sequence.context_len for sequence in sequences]
        new_tokens = sum(len(sequence.token_ids) for sequence in sequences)
        sampled = sum(sequence.sampling is not None for sequence in sequences)
        work = iteration_work(self._decoder.config, self._decoder.dtype, context_lens, new_tokens, sampled)
        return [Iteration(len(sequences), sum(context_lens), new_tokens, work, model_s, step_s)]
