"""Average prompt and output length of the workload."""

from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.request import R
from neo_desktop.engine.schedule.batch_builder import SchedulerLimits
from neo_desktop.engine.schedule.request_queues import RequestQueues
from neo_desktop.engine.schedule.steady_state import Workload

EXPECTED_OUTPUT_TOKENS = 200.0  # prior: one finished request with an output of this length
MEMORY = 512.0  # requests; the weight of older ones is halved
USED_SHARE = 0.95  # of a tier's memory; the rest lets requests grow


class WorkloadStats:
    """Running counts of prompts, tokens and finished requests.

    The final length of a running request is unknown. The mean output length is therefore all output tokens
    divided by all finished requests: the estimate if each token is equally likely to be the last.
    """

    def __init__(self) -> None:
        self._prompt_tokens, self._prompts = 0.0, 0.0
        self._output_tokens, self._ends = EXPECTED_OUTPUT_TOKENS, 1.0

    def add(self, prompt_tokens: int) -> None:
        if self._prompts >= MEMORY:
            self._prompt_tokens, self._prompts = self._prompt_tokens / 2, self._prompts / 2
        self._prompt_tokens += prompt_tokens
        self._prompts += 1

    def count_tokens(self, count: int) -> None:
        self._output_tokens += count

    def end(self) -> None:
        if self._ends >= MEMORY:
            self._output_tokens, self._ends = self._output_tokens / 2, self._ends / 2
        self._ends += 1

    @property
    def prompt_tokens(self) -> float:
        """Mean prompt length."""
        return max(self._prompt_tokens / max(self._prompts, 1.0), 1.0)

    @property
    def output_tokens(self) -> float:
        """Mean output length."""
        return max(self._output_tokens / self._ends, 1.0)

    @property
    def context_tokens(self) -> float:
        """Mean context of a decode, halfway through the output."""
        return self.prompt_tokens + self.output_tokens / 2

    def most_in(self, kv_cache: KVCache, tier: KVTier | None) -> int:
        """Return how many requests of average length a tier has memory for."""
        if tier is None or not kv_cache.capacity_tokens(tier):
            return 0
        return max(int(USED_SHARE * kv_cache.capacity_tokens(tier) / self.context_tokens), 1)

    def workload(self, queues: RequestQueues[R], limits: SchedulerLimits) -> Workload:
        """Return a workload of requests of average length, as many as there are."""
        there = min(queues.num_running + len(queues.waiting), limits.max_batch_requests)
        if queues.kv.states is not None:
            there = min(there, queues.kv.states.most_requests)
        device = next((tier for tier in queues.tiers if not tier.host_attends), None)
        host = next((tier for tier in queues.tiers if tier.cpu_attends), None)
        streamed = next((tier for tier in queues.tiers if tier.is_streamed and tier != device), None)
        most_on_device = min(self.most_in(queues.kv, device), there)
        left = there - most_on_device

        def most(tier: KVTier | None) -> int:
            return min(self.most_in(queues.kv, tier), left)

        return Workload(
            device,
            host,
            most_on_device,
            most(host),
            self.prompt_tokens,
            self.context_tokens,
            self.prompt_tokens / self.output_tokens,
            limits.max_batch_tokens,
            limits.max_token_ms,
            tuple((tier, count) for tier in queues.tiers if tier.is_remote and (count := most(tier))),
            most_streamed=most(streamed),
            most_elsewhere=left,
        )
