"""What the engine does right now, for people who look: a frozen snapshot, and what is noted for it meanwhile.

    somebody asks ──→ engine.live_view(): copies what is there, and lets `Notes` be taken for some seconds
    nobody asks   ──→ the notes stop by themselves; an iteration costs one comparison more

The engine's thread only notes and copies. What follows from it (overlap, errors, the bound) is computed by
the reader of a `LiveView`.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean
from typing import Self

import torch

from neo_desktop.engine.batch import IterationPlan, IterationTiming
from neo_desktop.engine.execute.timeline import Span, Timeline, busy_ns, overlap_ns
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import CostModel, TableCostModel
from neo_desktop.engine.remote.workers import WorkerState
from neo_desktop.engine.request import RequestState
from neo_desktop.engine.simulation.bound import Room, Work, least_ms
from neo_desktop.engine.stats import EngineStats

WATCH_S = 30.0  # how long notes are taken after somebody asked: longer than an iteration takes
MAX_ITERATIONS = 100  # that are noted
RATE_S = 3.0  # over which tokens per second are counted


class Phase(StrEnum):
    """What a request that owns KV is at."""

    PREFILLING = "prefilling"  # its prompt, or all of it again after a preemption, is being computed
    DECODING = "decoding"


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request that owns KV."""

    arrival: int  # ordinal; stays the same for as long as the request lives
    tier: KVTier
    phase: Phase
    num_tokens: int  # prompt and output so far
    num_computed_tokens: int  # of them, those whose KV is in the cache
    is_held: bool  # it waits for a later iteration, since the CPU has too much to do


@dataclass(frozen=True, slots=True)
class LiveIteration:
    """An iteration that has ended."""

    total_ms: float
    predicted_ms: float  # 0: nothing was predicted
    host_attention_ms: float
    num_sub_batches: int
    num_gpu_decodes: int
    num_cpu_decodes: int
    num_prompts: int  # of which a chunk was computed
    num_prompt_tokens: int  # of these chunks
    num_outputs: int  # tokens sampled
    num_copied_blocks: int  # KV blocks that moved to another tier
    prompt_context: float  # what the chunks' tokens attend to, summed over them
    longest_prompt: int  # tokens up to the end of a chunk
    decode_context: int  # what the decodes attend to, summed over them
    decoded: tuple[str, ...]  # requests that got a token as decodes

    @classmethod
    def of(cls, plan: IterationPlan, timing: IterationTiming) -> "LiveIteration":
        """Sum an iteration up."""
        decoded: list[str] = []
        num_gpu = num_cpu = num_prompts = num_prompt_tokens = num_outputs = decode_context = 0
        prompt_context, longest_prompt = 0.0, 1
        for sequence in plan.sequences:  # one pass: the engine's thread does it in every iteration
            num_tokens = len(sequence.token_ids)
            num_outputs += sequence.sampling is not None
            if num_tokens == 1:
                decoded.append(sequence.request_id)
                num_cpu += sequence.tier.host_attends
                num_gpu += not sequence.tier.host_attends
                decode_context += sequence.start + 1
            else:
                num_prompts += 1
                num_prompt_tokens += num_tokens
                prompt_context += num_tokens * (sequence.start + num_tokens / 2)
                longest_prompt = max(longest_prompt, sequence.start + num_tokens)
        for sequence in plan.async_sequences:  # each by a layer; the last one brings the token
            num_cpu += 1
            if sequence.sampling is not None:
                decoded.append(sequence.request_id)
                num_outputs += 1
                decode_context += sequence.start + 1
        return cls(
            total_ms=timing.total_ms,
            predicted_ms=plan.predicted.total_ms,
            host_attention_ms=timing.host_attention_ms,
            num_sub_batches=len(plan.sub_batches),
            num_gpu_decodes=num_gpu,
            num_cpu_decodes=num_cpu,
            num_prompts=num_prompts,
            num_prompt_tokens=num_prompt_tokens,
            num_outputs=num_outputs,
            num_copied_blocks=len(plan.copies),
            prompt_context=prompt_context,
            longest_prompt=longest_prompt,
            decode_context=decode_context,
            decoded=tuple(decoded),
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second."""

    prompt_tokens_per_s: float  # computed, not reused
    output_tokens_per_s: float
    over_s: float  # how long they were counted


@dataclass(frozen=True, slots=True)
class LeastTime:
    """How fast the work of the noted iterations could have been done at best."""

    real_ms: float  # what it took
    least_ms: float  # with the places of the policy, perfect overlap, nobody waiting
    gpu_alone_ms: float | None  # likewise with the GPU-cache alone; None: there is none

    @property
    def share(self) -> float:
        """The share of the bound that was reached."""
        return self.least_ms / self.real_ms


@dataclass(frozen=True, slots=True)
class LiveView:
    """What the engine does right now."""

    stats: EngineStats
    requests: tuple[LiveRequest, ...]  # those that own KV, by arrival
    num_gpu_alone: int | None  # of them the GPU-cache alone would hold at most; None: there is none
    is_gpu_imitated: bool  # the GPU's part runs on the CPU, with a GPU-cache in host memory
    device_name: str | None  # of the GPU
    weights_bytes: int  # all in the device's memory, in the model's dtype
    rates: Rates | None  # None: nobody has looked for long enough
    iterations: tuple[LiveIteration, ...]  # while somebody looked, the newest last
    spans: tuple[Span, ...]  # of the last iteration that was recorded, in the order of their start
    spans_age_s: float  # since that iteration's end
    tables: TableCostModel | None  # measured on this computer; None: the policy needs none
    workers: Mapping[KVTier, WorkerState] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        stats: EngineStats,
        running: Sequence[tuple[KVTier, RequestState]],
        notes: "Notes",
        device: torch.device,
        weights_bytes: int,
        cost_model: CostModel | None,
        async_case_engine: Collection[str] = (),
        workers: Mapping[KVTier, WorkerState] | None = None,
    ) -> Self:
        """Copy what is there.

        Args:
            running: the requests that own KV.
            device: the model's.
            cost_model: what the scheduler predicts with.
            own_pace: see `live_requests`.
            workers: attention workers; None: there are none.
        """
        is_cuda = device.type == "cuda"
        gpu_cache = next((pool for tier, pool in stats.pools.items() if not tier.in_host_memory), None)
        requests = [request for _, request in running]
        return cls(
            stats=stats,
            requests=live_requests(running, async_case_engine),
            num_gpu_alone=(
                num_fitting(requests, gpu_cache.num_blocks, stats.block_size) if gpu_cache else None
            ),
            is_gpu_imitated=not is_cuda,
            device_name=torch.cuda.get_device_name(device) if is_cuda else None,
            weights_bytes=weights_bytes,
            rates=notes.rates,
            iterations=notes.iterations,
            spans=notes.spans,
            spans_age_s=notes.spans_age_s,
            tables=cost_model if isinstance(cost_model, TableCostModel) else None,
            workers=workers or {},
        )

    @property
    def overlap(self) -> float | None:
        """The share of CPU attention's time in which the device was busy, too.

        None: there was no CPU attention in the recorded iteration, or the device's part was not recorded.
        """
        attention_ns = busy_ns(self.spans, "cpu")
        if attention_ns == 0 or not any(span.lane == "device" for span in self.spans):
            return None
        return overlap_ns(self.spans, "cpu", "device") / attention_ns

    @property
    def mean_error(self) -> float | None:
        """By how much predictions missed the noted iterations' times, relative to these, on average."""
        errors = [
            abs(i.predicted_ms - i.total_ms) / i.total_ms for i in self.iterations if i.predicted_ms > 0
        ]
        return fmean(errors) if errors else None

    @property
    def limit(self) -> LeastTime | None:
        """The bound for the work of the noted iterations; None without measured tables, and with workers."""
        if self.tables is None or not self.iterations or self.workers:
            return None
        chains = Counter(request_id for one in self.iterations for request_id in one.decoded)
        work = Work(
            linear_tokens=sum(len(one.decoded) + one.num_prompt_tokens for one in self.iterations),
            outputs=sum(one.num_outputs for one in self.iterations),
            prompt_context=sum(one.prompt_context for one in self.iterations),
            longest_prompt=max(one.longest_prompt for one in self.iterations),
            decodes=sum(chains.values()),
            decode_context=sum(one.decode_context for one in self.iterations),
            longest_chain=max(chains.values(), default=0),
        )
        room = Room(self.capacity_tokens(False), self.capacity_tokens(True))
        return LeastTime(
            real_ms=sum(one.total_ms for one in self.iterations),
            least_ms=least_ms(self.tables, work, room),
            gpu_alone_ms=least_ms(self.tables, work, room, 0.0, 0.0) if room.gpu_tokens else None,
        )

    def capacity_tokens(self, in_host_memory: bool) -> int:
        """Tokens that all tiers in this computer's host memory, or in the device's, can hold."""
        pools = ((tier, pool) for tier, pool in self.stats.pools.items() if not tier.is_remote)
        blocks = sum(pool.num_blocks for tier, pool in pools if tier.in_host_memory is in_host_memory)
        return blocks * self.stats.block_size


class Notes:
    """Takes notes about iterations while somebody looks. All calls come from the engine's thread.

    Args:
        timeline: records single iterations for the view; None: there are no spans.
        clock: in seconds.
    """

    def __init__(
        self, timeline: Timeline | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._timeline = timeline
        self._clock = clock
        self._until_s = float("-inf")
        self._num_prompt_tokens = 0  # computed while somebody looked
        self._num_output_tokens = 0
        self._samples: deque[tuple[float, int, int]] = deque()  # (when, prompt tokens, output tokens) by then
        self._iterations: deque[LiveIteration] = deque(maxlen=MAX_ITERATIONS)

    @property
    def is_on(self) -> bool:
        """Whether somebody asked lately."""
        return self._clock() < self._until_s

    def ask(self) -> None:
        """Take notes from now on for some seconds, and record the iteration that begins next."""
        now = self._clock()
        if now >= self._until_s:  # what was noted long ago says nothing about now
            self._samples.clear()
            self._iterations.clear()
        self._until_s = now + WATCH_S
        while len(self._samples) > 1 and self._samples[1][0] <= now - RATE_S:
            self._samples.popleft()
        self._samples.append((now, self._num_prompt_tokens, self._num_output_tokens))
        if self._timeline is not None:
            self._timeline.record_next()

    def note(self, plan: IterationPlan, timing: IterationTiming) -> None:
        """Note an iteration that has ended."""
        iteration = LiveIteration.of(plan, timing)
        self._iterations.append(iteration)
        self.count(iteration.num_prompt_tokens, iteration.num_outputs)

    def count(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count tokens that were computed, for the rates."""
        self._num_prompt_tokens += num_prompt_tokens
        self._num_output_tokens += num_output_tokens

    @property
    def iterations(self) -> tuple[LiveIteration, ...]:
        """What was noted."""
        return tuple(self._iterations)

    @property
    def rates(self) -> Rates | None:
        """Tokens per second between the calls of `ask` in the last seconds."""
        if len(self._samples) < 2:
            return None
        (start_s, *start), (end_s, *end) = self._samples[0], self._samples[-1]
        over_s = max(end_s - start_s, 1e-9)
        prompt, output = ((after - before) / over_s for before, after in zip(start, end, strict=True))
        return Rates(prompt, output, over_s)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Those of the last iteration that was recorded."""
        return () if self._timeline is None else self._timeline.last

    @property
    def spans_age_s(self) -> float:
        """How long ago that iteration ended."""
        spans = self.spans
        return time.perf_counter() - max(span.end_ns for span in spans) / 1e9 if spans else 0.0


def live_requests(
    running: Iterable[tuple[KVTier, RequestState]], async_case_engine: Collection[str] = ()
) -> tuple[LiveRequest, ...]:
    """Return what is to be told of requests that own KV, by arrival.

    Args:
        running: where each lives.
        own_pace: whose next token is under way at its own pace; the CPU works on it between turns, too.
    """
    requests = [
        LiveRequest(
            arrival=request.arrival,
            tier=tier,
            phase=Phase.PREFILLING if request.num_uncomputed_tokens > 1 else Phase.DECODING,
            num_tokens=request.num_tokens,
            num_computed_tokens=request.num_computed_tokens,
            is_held=request.iterations_waited > 0 and request.request_id not in async_case_engine,
        )
        for tier, request in running
    ]
    return tuple(sorted(requests, key=lambda request: request.arrival))


def num_fitting(requests: Sequence[RequestState], num_blocks: int, block_size: int) -> int:
    """Return how many of the requests a cache of so many blocks holds at once, at most: the shortest first.

    Blocks with the same content are there once, even if several requests have them.
    """
    seen: set[bytes] = set()
    for count, request in enumerate(sorted(requests, key=lambda request: request.num_tokens)):
        hashes = request.block_hashes(block_size)
        seen.update(hashes)
        num_blocks -= -(-request.num_tokens // block_size) - len(hashes)
        if len(seen) > num_blocks:
            return count
    return len(requests)
