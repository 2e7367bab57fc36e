"""Live views: a frozen snapshot of the engine's activity, and the notes behind it.

    a client polls  ──→ engine.live_view(): copies the state, and enables `Notes` for some seconds
    no client polls ──→ the notes expire; an iteration then costs one comparison

The engine's thread only notes and copies. The reader of a `LiveView` computes derived values (overlap,
errors, the bound).
"""

import time
from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean

from neo_desktop.engine.batch import IterationPlan, IterationTiming
from neo_desktop.engine.execute.timeline import Span, Timeline, busy_ns, overlap_ns
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.remote.workers import WorkerState
from neo_desktop.engine.request import RequestState
from neo_desktop.engine.simulation.bound import Room, Work, least_ms
from neo_desktop.engine.stats import EngineStats

WATCH_S = 30.0  # duration of notes after a poll: longer than an iteration
MAX_ITERATIONS = 100  # limit on noted iterations
RATE_S = 3.0  # averaging time of tokens per second


class Phase(StrEnum):
    """Phase of a running request."""

    PREFILLING = "prefilling"  # computing its prompt, or recomputing all tokens after a preemption
    DECODING = "decoding"


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A running request."""

    arrival: int  # ordinal, fixed for the request's lifetime
    tier: KVTier
    phase: Phase
    num_tokens: int  # prompt and output so far
    num_computed_tokens: int  # tokens whose KV is in the cache
    is_held: bool  # waits for a later iteration, because the CPU is overloaded


@dataclass(frozen=True, slots=True)
class LiveIteration:
    """A finished iteration."""

    total_ms: float
    predicted_ms: float  # 0: no prediction
    host_attention_ms: float
    num_cpu_decodes: int
    num_prompt_tokens: int  # in chunks
    num_outputs: int  # tokens sampled
    prompt_context: float  # attended tokens, summed over prompt tokens
    longest_prompt: int  # tokens up to the end of a chunk
    decode_context: int  # attended tokens, summed over decodes
    decoded: tuple[str, ...]  # requests whose decode produced a token

    @classmethod
    def of(cls, plan: IterationPlan, timing: IterationTiming, num_accepted: int = 0) -> "LiveIteration":
        """Summarise an iteration; `num_accepted` tokens of drafts were right."""
        sequences, in_flight = list(plan.sequences), list(plan.async_sequences)
        decodes = [sequence for sequence in sequences if sequence.is_decode]
        chunks = [sequence for sequence in sequences if not sequence.is_decode]
        # Async decodes advance by a layer each; those at the last stage produce tokens.
        ended = [sequence for sequence in in_flight if sequence.sampling is not None]
        num_sampled = sum(s.sampling is not None and not s.is_draft for s in sequences)
        return cls(
            total_ms=timing.total_ms,
            predicted_ms=plan.predicted.total_ms,
            host_attention_ms=timing.host_attention_ms,
            num_cpu_decodes=sum(sequence.tier.host_attends for sequence in decodes) + len(in_flight),
            num_prompt_tokens=sum(len(chunk.token_ids) for chunk in chunks),
            num_outputs=num_sampled + num_accepted + len(ended),
            prompt_context=sum(len(c.token_ids) * (c.start + len(c.token_ids) / 2) for c in chunks),
            longest_prompt=max((chunk.context_len for chunk in chunks), default=1),
            decode_context=sum(sequence.context_len for sequence in (*decodes, *ended)),
            decoded=tuple(sequence.request_id for sequence in (*decodes, *ended)),
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second."""

    prompt_tokens_per_s: float  # computed, not reused
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class LeastTime:
    """Lower bound on the time of the noted iterations."""

    real_ms: float  # measured time
    least_ms: float  # with the policy's tiers, perfect overlap and no waiting
    gpu_alone_ms: float | None  # with the GPU-cache alone; None: no GPU-cache exists

    @property
    def share(self) -> float:
        """Share of the bound that was reached."""
        return self.least_ms / self.real_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveView:
    """A snapshot of the engine's activity."""

    stats: EngineStats
    requests: tuple[LiveRequest, ...]  # running requests, by arrival
    num_gpu_alone: int | None = None  # how many fit in the GPU-cache alone; None: no GPU-cache exists
    is_gpu_imitated: bool = False  # the CPU stands in for the GPU, with a GPU-cache in host memory
    device_name: str | None  # of the GPU
    weights_bytes: int  # all in the device's memory, in the model's dtype
    rates: Rates | None  # None: polling started too recently
    iterations: tuple[LiveIteration, ...] = ()  # noted iterations, the newest last
    spans: tuple[Span, ...] = ()  # of the last recorded iteration, by start time
    spans_age_s: float = 0.0  # since the end of that iteration
    tables: TableCostModel | None = None  # measured on this computer; None: the policy needs none
    workers: Mapping[KVTier, WorkerState] = field(default_factory=dict)

    @property
    def overlap(self) -> float | None:
        """Share of the CPU attention time in which the device was busy.

        None: the recorded iteration had no CPU attention, or the device's part was not recorded.
        """
        attention_ns = busy_ns(self.spans, "cpu")
        if attention_ns == 0 or not any(span.lane == "device" for span in self.spans):
            return None
        return overlap_ns(self.spans, "cpu", "device") / attention_ns

    @property
    def mean_error(self) -> float | None:
        """Mean relative error of the predictions for the noted iterations."""
        errors = [
            abs(i.predicted_ms - i.total_ms) / i.total_ms for i in self.iterations if i.predicted_ms > 0
        ]
        return fmean(errors) if errors else None

    @property
    def limit(self) -> LeastTime | None:
        """The bound for the noted iterations; None without measured tables, and with workers."""
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
        """Return the token capacity of this computer's tiers in host memory, or in device memory."""
        pools = ((tier, pool) for tier, pool in self.stats.pools.items() if not tier.is_remote)
        blocks = sum(pool.num_blocks for tier, pool in pools if tier.in_host_memory is in_host_memory)
        return blocks * self.stats.block_size


class Notes:
    """Notes about iterations while a client polls. All calls come from the engine's thread.

    Args:
        timeline: records single iterations for the view; None: no spans.
    """

    def __init__(self, timeline: Timeline | None = None) -> None:
        self._timeline = timeline
        self._until_s = float("-inf")
        self._num_prompt_tokens = 0  # computed while notes are enabled
        self._num_output_tokens = 0
        self._samples: deque[tuple[float, int, int]] = deque()  # (time, prompt tokens, output tokens) so far
        self._iterations: deque[LiveIteration] = deque(maxlen=MAX_ITERATIONS)

    @property
    def is_on(self) -> bool:
        """True if a client polled recently."""
        return time.perf_counter() < self._until_s

    def ask(self) -> None:
        """Enable notes for some seconds, and record the next iteration."""
        now = time.perf_counter()
        if now >= self._until_s:  # old notes are stale
            self._samples.clear()
            self._iterations.clear()
        self._until_s = now + WATCH_S
        while len(self._samples) > 1 and self._samples[1][0] <= now - RATE_S:
            self._samples.popleft()
        self._samples.append((now, self._num_prompt_tokens, self._num_output_tokens))
        if self._timeline is not None:
            self._timeline.record_next()

    def note(self, plan: IterationPlan, timing: IterationTiming, num_accepted: int = 0) -> None:
        """Note an iteration; `num_accepted` tokens of drafts were right."""
        iteration = LiveIteration.of(plan, timing, num_accepted)
        self._iterations.append(iteration)
        self.count(iteration.num_prompt_tokens, iteration.num_outputs)

    def count(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count computed tokens, for the rates."""
        self._num_prompt_tokens += num_prompt_tokens
        self._num_output_tokens += num_output_tokens

    @property
    def iterations(self) -> tuple[LiveIteration, ...]:
        return tuple(self._iterations)

    @property
    def rates(self) -> Rates | None:
        """Tokens per second between recent calls of `ask`."""
        if len(self._samples) < 2:
            return None
        (start_s, *start), (end_s, *end) = self._samples[0], self._samples[-1]
        over_s = max(end_s - start_s, 1e-9)
        prompt, output = ((after - before) / over_s for before, after in zip(start, end, strict=True))
        return Rates(prompt, output)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Spans of the last recorded iteration."""
        return () if self._timeline is None else self._timeline.last

    @property
    def spans_age_s(self) -> float:
        """Time since the end of that iteration."""
        spans = self.spans
        return time.perf_counter() - max(span.end_ns for span in spans) / 1e9 if spans else 0.0


def live_requests(
    running: Iterable[tuple[KVTier, RequestState]], async_decodes: Container[RequestState] = ()
) -> tuple[LiveRequest, ...]:
    """Return the live state of running requests, by arrival.

    Args:
        running: requests with their tiers.
        async_decodes: requests with an async decode in flight; the CPU also works on them between async
            steps.
    """
    requests = [
        LiveRequest(
            arrival=request.arrival,
            tier=tier,
            phase=Phase.PREFILLING if request.num_uncomputed_tokens > 1 else Phase.DECODING,
            num_tokens=request.num_tokens,
            num_computed_tokens=request.num_computed_tokens,
            is_held=request.iterations_waited > 0 and request not in async_decodes,
        )
        for tier, request in running
    ]
    return tuple(sorted(requests, key=lambda request: request.arrival))


def num_fitting(requests: Sequence[RequestState], num_blocks: int, block_size: int) -> int:
    """Return the maximum number of these requests that a cache of `num_blocks` holds: the shortest first.

    Blocks with equal content count once, even if several requests share them.
    """
    seen: set[bytes] = set()
    for count, request in enumerate(sorted(requests, key=lambda request: request.num_tokens)):
        hashes = request.block_hashes(block_size)
        seen.update(hashes)
        num_blocks -= -(-request.num_tokens // block_size) - len(hashes)
        if len(seen) > num_blocks:
            return count
    return len(requests)
