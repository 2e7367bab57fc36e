"""Scheduling policies: the KV tiers of requests and the decisions that differ between papers.

admits           may a prompt live in another tier when the preferred one is full?
spills           may a request that must leave the preferred tier continue in another, or must it wait?
prefill_budget   prompt tokens of the iteration
streams          may streamed decodes whose copies are hidden join the iteration?
partition        assignment of the queue's decodes to sub-batches
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

from neo_desktop.engine.kv_tier import ALL_TIERS, MEASURED_TIERS, KVTier
from neo_desktop.engine.predict.estimate import Decodes, IterationShape, iteration_ms
from neo_desktop.engine.schedule import streamed
from neo_desktop.engine.schedule.batch_builder import BatchBuilder
from neo_desktop.engine.schedule.partition import CandidateGenerator, Objective, Partition
from neo_desktop.engine.schedule.steady_state import Kind, SteadyState

SMALLEST_CHUNK_TOKENS = 64  # smallest prefill budget beside CPU decodes;
SURPLUS = 1.25  # admitted requests, relative to the steady state's, in host memory;
FILLING_ITERATIONS = 32  # iterations in which prompts fill the device's free memory
MAX_READING_SHARE = 0.15  # time per token may exceed a full iteration's by this share, for weight reads


@dataclass(frozen=True)
class Policy:
    """Baseline: all requests with memory in one batch. `tiers` are in order of preference."""

    name: str
    tiers: tuple[KVTier, ...]
    needs_predictions = False  # decisions depend on a cost model
    needs_steady_state = False  # the batch builder must know the steady state

    @property
    def swaps(self) -> bool:
        """True if KV in host memory may be streamed to the device."""
        return any(tier.is_streamed for tier in self.tiers)

    def with_tiers(self, more: Iterable[KVTier]) -> Self:
        """Return the policy with further, less preferred tiers."""
        return replace(self, tiers=(*self.tiers, *more))

    def admits(self, builder: BatchBuilder, tier: KVTier, num_tokens: int) -> bool:
        """Return True if a prompt of `num_tokens` may live in a tier other than the preferred one."""
        return True

    def spills(self, builder: BatchBuilder, tier: KVTier, num_tokens: int) -> bool:
        """Return True if a request may move to that tier.

        Args:
            builder: the decodes that would remain in the preferred tier.
        """
        return True

    def prefill_budget(self, builder: BatchBuilder) -> tuple[int, int | None]:
        """Return the number of prompt tokens to add, and the most per prompt; None: no limit per prompt."""
        return builder.budget, None

    def streams(self, builder: BatchBuilder, decodes: Mapping[KVTier, Decodes]) -> bool:
        """Return True if these streamed decodes, whose copies are hidden, may join."""
        return True

    def partition(self, builder: BatchBuilder) -> Partition:
        """Assign the decodes of the queue to sub-batches."""
        return CandidateGenerator(builder).together()


class Swapping(Policy):
    """Pie: the device attends for all requests and streams KV from host memory, layer by layer.

    It streams as much as hides behind the device's work. Measured bus times correct the prediction.
    """

    needs_predictions = True

    def admits(self, builder: BatchBuilder, tier: KVTier, num_tokens: int) -> bool:
        return streamed.admits(builder, tier, num_tokens)


class Halves(Policy):
    """FastDecode: two sub-batches with equal attention on the host."""

    def partition(self, builder: BatchBuilder) -> Partition:
        return CandidateGenerator(builder).halves()


class Hidden(Policy):
    """NEO's six steps: host attention hides behind the device, or waits."""

    needs_predictions = True

    def admits(self, builder: BatchBuilder, tier: KVTier, num_tokens: int) -> bool:
        """Step 5: admit no prompt while the host has more decodes than can hide, unless it lets more hide."""
        generator = CandidateGenerator(builder)
        num_hidden = sum(map(len, generator.fill()))
        if num_hidden == len(builder.queue):
            return True
        tokens = min(num_tokens, builder.budget)
        shape = builder.shape._replace(tokens=builder.shape.tokens + tokens)
        beside = CandidateGenerator(replace(builder, shape=shape))
        return sum(map(len, beside.fill())) > num_hidden

    def partition(self, builder: BatchBuilder) -> Partition:
        """Steps 4 and 6, by NEO's criterion: requests per time."""
        generator = CandidateGenerator(builder)
        partition = generator.hidden()
        if not builder.shape.tokens:
            # No device work to overlap with, so run all CPU decodes now.
            return partition if partition.num_taken else generator.halves()
        if builder.num_starved or not partition.num_taken:
            return partition
        worth = Objective(decode=1.0, rest=builder.shape.num_decodes + len(builder.chunks))
        return worth.best((partition, generator.front(0, 0)))


class Apart(Hidden):
    """APEX: NEO's two sub-batches, or one sub-batch with async decodes of the host.

    Iterations with prompts follow NEO. Iterations of decodes alone take the one with more requests per time.
    """

    def partition(self, builder: BatchBuilder) -> Partition:
        pipelined = super().partition(builder)
        if builder.chunks or builder.num_starved or not builder.shape.tokens:
            return pipelined
        generator = CandidateGenerator(builder)
        apart = generator.with_async(generator.front(0, 0))
        worth = Objective(1.0, builder.shape.num_decodes, builder.cost.num_layers)
        return worth.best((pipelined, *apart))


class Fastest(Policy):
    """Takes the candidate with the highest predicted throughput, the device alone included.

    The best steady state of the workload decides long-term questions: the requests' tiers and the prompt
    tokens of an iteration. The value of tokens in that steady state decides which decodes join an iteration.
    (NEO's step 6 compares requests per time. That criterion cannot weigh prompt tokens.)

    No steady state has async decodes of workers: it would have to fill the workers' memory first, which runs
    of some hundred requests do not pay back. Requests in a worker's memory may still run asynchronously when
    that raises throughput.
    """

    needs_predictions = True
    needs_steady_state = True

    def admits(self, builder: BatchBuilder, tier: KVTier, num_tokens: int) -> bool:
        """Admit the steady state's number and a surplus, so that prompts never run out."""
        if tier.is_streamed:
            has_room = builder.num_streamed < SURPLUS * _steady_state(builder).num_streamed
            return has_room and streamed.admits(builder, tier, num_tokens)
        return not tier.host_attends or builder.num_on_host < SURPLUS * _steady_state(builder).num_on_host

    def spills(self, builder: BatchBuilder, tier: KVTier, num_tokens: int) -> bool:
        """Allow a spill if the steady state uses that tier; prefer tiers whose KV is attended in place."""
        if tier.is_streamed:
            return not _steady_state(builder).num_on_host or self.admits(builder, tier, num_tokens)
        return not tier.host_attends or _steady_state(builder).num_on_host > 0

    def prefill_budget(self, builder: BatchBuilder) -> tuple[int, int | None]:
        """Return the steady state's prompt tokens, but at least enough to justify reading the weights.

        If all requests fit on the device, there is no limit: a short TTFT matters more.
        """
        steady_state = _steady_state(builder)
        if builder.num_running + builder.num_waiting <= builder.most_on_device:
            return builder.budget, None
        is_whole = steady_state.has_whole_prompts
        worthwhile = _worthwhile_tokens(builder, has_whole_prompts=is_whole)
        least = max(worthwhile - builder.shape.tokens, SMALLEST_CHUNK_TOKENS)
        missing = min(
            steady_state.num_device - (builder.num_running - builder.num_on_host), builder.num_waiting
        )
        room = max(missing, 0) * builder.mean_prompt_tokens / FILLING_ITERATIONS
        tokens = math.ceil(max(steady_state.chunk_tokens, least, room, is_whole * builder.mean_prompt_tokens))
        most_per_prompt = -(-tokens // 2) if steady_state.kind is Kind.PROMPTS_IN_BOTH else None
        return min(tokens, builder.budget), most_per_prompt

    def streams(self, builder: BatchBuilder, decodes: Mapping[KVTier, Decodes]) -> bool:
        """Allow streamed decodes that raise the value per time of the device's work."""
        shape, more = builder.shape, builder.shape.plus(decodes)
        worth = _objective(builder)
        without, beside = (
            iteration_ms(builder.cost, IterationShape((each,), builder.moved_tokens))
            for each in (shape, more)
        )
        gained = worth.decode * (more.num_decodes - shape.num_decodes)
        return (worth.rest + gained) * without >= worth.rest * beside

    def partition(self, builder: BatchBuilder) -> Partition:
        """Return the candidate with the highest value per time."""
        partitions = self._candidates(builder)
        if builder.num_starved:
            partitions = (partition for partition in partitions if partition.num_taken)
        return _objective(builder).best(partitions)

    def _candidates(self, builder: BatchBuilder) -> Iterator[Partition]:
        generator = CandidateGenerator(builder)
        yield from generator.with_prompts_in_both()
        may_begin = _steady_state(builder).num_async > 0 or not builder.chunks
        for partition in generator.candidates():
            yield partition
            yield from generator.with_async(partition, workers_only=not may_begin)


def _steady_state(builder: BatchBuilder) -> SteadyState:
    assert builder.steady_state is not None
    return builder.steady_state


def _objective(builder: BatchBuilder) -> Objective:
    """Return the value of the batch and of further decodes in the steady state."""
    steady_state, num_layers = _steady_state(builder), builder.cost.num_layers
    if not builder.chunks:
        return Objective(1.0, builder.shape.num_decodes, num_layers)
    rest = (
        builder.shape.num_decodes * steady_state.decode_ms + builder.num_chunk_tokens * steady_state.prompt_ms
    )
    return Objective(max(steady_state.decode_ms, steady_state.prompt_ms), rest, num_layers)


def _worthwhile_tokens(builder: BatchBuilder, *, has_whole_prompts: bool) -> int:
    """Return the number of tokens from which on the time per token is near the shortest.

    Args:
        has_whole_prompts: the time includes launches.
    """
    cost, large = builder.cost, builder.limits.max_batch_tokens
    fixed_ms = cost.outside_ms / cost.num_layers
    token_ms = (cost.linear_ms(large) + fixed_ms) / large * (1 + MAX_READING_SHARE)
    fixed_ms += cost.launch_ms if has_whole_prompts else 0.0
    return bisect_left(
        range(1, large), 1, key=lambda tokens: cost.linear_ms(tokens) + fixed_ms <= token_ms * tokens
    )


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("gpu-only", (KVTier.DEVICE,)),
        Halves("fastdecode", (KVTier.HOST,)),
        Hidden("neo", MEASURED_TIERS),
        Apart("apex", MEASURED_TIERS),
        Swapping("pie", (KVTier.DEVICE, KVTier.STREAMED)),
        Fastest("auto", ALL_TIERS),
    )
}


def get_policy(name: str) -> Policy:
    """Return the policy with that name.

    Raises:
        ValueError: unknown name; the message lists the valid ones.
    """
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is unknown; choose one of: {', '.join(POLICIES)}")
    return POLICIES[name]
