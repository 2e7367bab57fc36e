"""A batch under construction, in numbers: its limits, its contents and the decodes that may still join."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.options import MAX_TOKEN_MS
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.predict.estimate import BatchShape, Decodes
from neo_desktop.engine.schedule.steady_state import SteadyState


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds on one iteration."""

    max_batch_tokens: int  # tokens in the linear stages; longer prompts are prefilled in chunks
    max_batch_requests: int  # requests that run at the same time
    max_token_ms: float = MAX_TOKEN_MS  # limit on the predicted time per token of async decodes

    def __post_init__(self) -> None:
        if self.max_batch_requests < 1 or self.max_batch_tokens < self.max_batch_requests:
            raise ValueError(
                "max_batch_requests must be at least 1 and max_batch_tokens at least max_batch_requests, got "
                f"{self.max_batch_requests} and {self.max_batch_tokens}"
            )
        if not self.max_token_ms >= 0:
            raise ValueError(f"max_token_ms must be at least 0, got {self.max_token_ms}")


class HostQueue:
    """Decodes whose attention runs on the host, in the order in which iterations take them.

    Args:
        contexts: (KV tier, context tokens) per decode.
    """

    def __init__(self, contexts: Sequence[tuple[KVTier, int]]) -> None:
        self.contexts = contexts
        # (tier, number of decodes before i, tokens before i)
        self._sums: list[tuple[KVTier, Sequence[int], Sequence[int]]] = []
        if not contexts:
            return
        tiers, tokens = zip(*contexts, strict=True)
        if tiers.count(tiers[0]) == len(tiers):
            sums = list(accumulate(tokens, initial=0))
            self._sums.append((tiers[0], range(len(sums)), sums))
            return
        for tier in dict.fromkeys(tiers):
            is_here = [each == tier for each in tiers]
            here = [each * is_one for each, is_one in zip(tokens, is_here, strict=True)]
            self._sums.append((tier, [0, *accumulate(is_here)], [0, *accumulate(here)]))

    def __len__(self) -> int:
        return len(self.contexts)

    def decodes(self, positions: Sequence[int]) -> dict[KVTier, Decodes]:
        """Return `tier -> decodes` for the given positions of the queue."""
        decodes: dict[KVTier, Decodes] = {}
        if isinstance(positions, range):
            for tier, counts, tokens in self._sums:
                requests = counts[positions.stop] - counts[positions.start]
                if requests:
                    decodes[tier] = Decodes(requests, tokens[positions.stop] - tokens[positions.start])
            return decodes
        for position in positions:
            tier, context_tokens = self.contexts[position]
            requests, before = decodes.get(tier, (0, 0))
            decodes[tier] = Decodes(requests + 1, before + context_tokens)
        return decodes

    def host_ms(self, cost: TableCostModel, begin: int, end: int) -> float:
        """Return the host time of the decodes `begin .. end - 1`; see `OffDeviceTimes.all`.

        The scheduler's hot path: it calls this for many ranges of the queue in each iteration.
        """
        ms, num_all, worker_ms = 0.0, 0, 0.0
        for tier, counts, tokens in self._sums:
            requests = counts[end] - counts[begin]
            if requests:
                num_all += requests
                here_ms = cost.attention_ms(tier, requests, tokens[end] - tokens[begin])
                if tier.is_remote:
                    worker_ms = max(worker_ms, here_ms + cost.network_ms(tier, requests).all)
                else:
                    ms += here_ms
        return max(ms, worker_ms) + cost.offload_ms(num_all) if num_all else 0.0

    def tokens(self, begin: int, end: int) -> int:
        """Return the context tokens of the decodes `begin .. end - 1`."""
        return sum(tokens[end] - tokens[begin] for _, _, tokens in self._sums)


class Chunk(NamedTuple):
    """Some tokens of a prompt."""

    tokens: int
    prefill_ms: float  # T_pf of one layer; 0 for a single token, which is a decode
    rows: int  # rows to sample: 1 if this is the prompt's last chunk


@dataclass(slots=True)
class BatchBuilder:
    """Contents of the batch so far."""

    cost: TableCostModel
    limits: SchedulerLimits
    budget: int  # tokens that may still be added
    shape: BatchShape  # of sub-batch 0, without the queue
    queue: HostQueue = field(default_factory=lambda: HostQueue(()))
    num_starved: int = 0  # decodes at the front of the queue that join at any cost
    moved_tokens: int = 0  # tokens whose KV crosses the bus during the iteration; see `IterationShape`
    num_waiting: int = 0  # prompts without KV
    mean_prompt_tokens: float = 0.0
    num_running: int = 0  # requests with KV in some tier
    num_on_host: int = 0  # requests whose decode attention runs on the host;
    most_on_device: int = 0  # requests of average length that fit in the preferred tier
    num_streamed: int = 0  # requests whose KV is streamed to the device
    # Returns the running requests as decodes, by tier.
    typical_decodes: Callable[[], Mapping[KVTier, Decodes]] = dict
    async_decodes: Mapping[KVTier, Decodes] = field(default_factory=dict)  # async decodes in flight
    steady_state: SteadyState | None = None  # best in the long run; None: the policy does not use it
    chunks: list[Chunk] = field(default_factory=list)

    def add_chunk(self, tier: KVTier, tokens: int, start: int, num_tokens: int) -> None:
        """Add tokens of a request.

        Args:
            tokens: at most the budget, unless the request has an image that must not be cut.
            start: tokens computed before.
            num_tokens: tokens of the request.
        """
        shape = self.shape
        is_last = start + tokens == num_tokens
        prefill_ms = 0.0
        if tokens > 1:
            prefill_ms = self.cost.prefill_attention_ms(tokens, start)
            self.shape = BatchShape(
                shape.tokens + tokens,
                shape.rows + is_last,
                shape.prefill_ms + prefill_ms,
                shape.decodes,
                # A streamed prompt fetches the KV before the chunk and stores the chunk's own.
                shape.fetched + (start if tier.is_streamed else 0),
                shape.stored + (tokens if tier.is_streamed else 0),
            )
        else:  # a single token runs through the decode kernels
            self.shape = shape.plus({tier: Decodes(1, start + 1)})._replace(rows=shape.rows + is_last)
        self.budget = max(self.budget - tokens, 0)
        self.chunks.append(Chunk(tokens, prefill_ms, int(is_last)))
        if tier.host_attends:
            self.moved_tokens += tokens

    @property
    def num_chunk_tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)
