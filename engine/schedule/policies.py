"""Policies: where requests may live, and the decisions that are not the same for all.

admits   whether a prompt for which the preferred tier has no room may live in another
spills   whether a request that must leave the preferred tier may go on in another, or waits
pace     how many tokens of prompts join an iteration beside the host's decodes
swap     which decodes whose KV lies in host memory the device attends for
divide   which decodes of the queue join which sub-batch
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from neo_desktop.engine.kv_tier import ALL_TIERS, MEASURED_TIERS, KVTier
from neo_desktop.engine.schedule import streamed
from neo_desktop.engine.schedule.batch_builder import BatchBuilder
from neo_desktop.engine.schedule.partition import CandidateGenerator, Objective, Partition
from neo_desktop.engine.schedule.steady_state import Kind, SteadyState

SMALLEST_CHUNK_TOKENS = 64  # of a prompt, where CPU decodes set the pace
SURPLUS = 1.25  # how many more requests than it needs may live in host memory
FILLING_ITERATIONS = 32  # in which the device's free memory gets its prompts
MAX_READING_SHARE = 0.15  # by which tokens of an iteration with prompts may take longer than in a large one


@dataclass(frozen=True)
class Policy:
    """Everything that has room in one batch; the tiers come with the most preferred one first."""

    name: str
    tiers: tuple[KVTier, ...]
    needs_predictions = False  # whether its decisions depend on a cost model
    needs_steady_state = False  # whether drafts tell what is best in the long run

    @property
    def swaps(self) -> bool:
        """Whether KV of host memory may come to the device to be attended to."""
        return any(tier.is_streamed for tier in self.tiers)

    def with_tiers(self, more: Iterable[KVTier]) -> Self:
        """Return the policy with further tiers, behind its own."""
        return replace(self, tiers=(*self.tiers, *more))

    def admits(self, builder: BatchBuilder, tier: KVTier, num_tokens: int) -> bool:
        """Whether a prompt of so many tokens may live in a tier that is not the preferred one."""
        return True

    def spills(self, builder: BatchBuilder, tier: KVTier, num_tokens: int) -> bool:
        """Whether a request may go on in such a tier; the draft is what the preferred one would keep."""
        return True

    def prefill_budget(self, builder: BatchBuilder) -> int:
        """Return how many tokens of prompts join."""
        return builder.budget

    def swap(
        self, builder: BatchBuilder, decodes: Sequence[tuple[KVTier, int]], num_starved: int
    ) -> Sequence[int]:
        """Return the positions of those that join; see `streamed.hidden`."""
        return range(len(decodes))

    def partition(self, builder: BatchBuilder) -> Partition:
        """Divide the queue."""
        return _generator(builder).together()


class Swapping(Policy):
    """The device attends for all, and KV in host memory comes to it layer by layer: Pie.

    As much of it as hides behind the device's work, as predicted and corrected by what the bus really takes.
    """

    needs_predictions = True

    def admits(self, builder: BatchBuilder, tier: KVTier, num_tokens: int) -> bool:
        """As long as nobody waits for copies."""
        return streamed.admits(builder, tier, num_tokens)

    def swap(
        self, builder: BatchBuilder, decodes: Sequence[tuple[KVTier, int]], num_starved: int
    ) -> Sequence[int]:
        return streamed.hidden(builder, decodes, num_starved)


class Halves(Policy):
    """Two sub-batches with equal attention on the host: FastDecode."""

    def partition(self, builder: BatchBuilder) -> Partition:
        """Divide the queue."""
        return _generator(builder).halves()


class Hidden(Policy):
    """NEO's six steps: the host hides behind the device, or waits."""

    needs_predictions = True

    def admits(self, builder: BatchBuilder, tier: KVTier, num_tokens: int) -> bool:
        """Step 5: nobody joins while the host has more to do than hides, unless more hides beside it."""
        generator = _generator(builder)
        num_hidden = sum(map(len, generator.fill(builder.num_starved)))
        if num_hidden == len(builder.queue):
            return True
        tokens = min(num_tokens, builder.budget)
        shape = builder.shape._replace(tokens=builder.shape.tokens + tokens)
        beside = CandidateGenerator(builder.cost, shape, builder.queue, builder.moved_tokens)
        return sum(map(len, beside.fill(builder.num_starved))) > num_hidden

    def partition(self, builder: BatchBuilder) -> Partition:
        """Steps 4 and 6, with NEO's measure: requests over time."""
        generator = _generator(builder)
        partition = generator.hidden(builder.num_starved)
        if not builder.shape.tokens:
            # Where nothing hides, waiting would not help anybody.
            return partition if partition.num_taken else generator.halves()
        if builder.num_starved or not partition.num_taken:
            return partition
        worth = Objective(decode=1.0, rest=builder.shape.num_decodes + len(builder.chunks))
        return worth.best((partition, generator.front(0, 0)))[0]


class Apart(Hidden):
    """APEX: NEO's two sub-batches, or one, beside which the host's decodes go at their own pace.

    Beside prompts as NEO. Without them, whatever brings more requests forward per time.
    """

    def partition(self, builder: BatchBuilder) -> Partition:
        """Compare the two, for decodes alone."""
        pipelined = super().partition(builder)
        if builder.chunks or builder.num_starved or not builder.shape.tokens:
            return pipelined
        generator = _generator(builder)
        apart = generator.with_async(generator.front(0, 0), builder.limits.max_token_ms)
        worth = Objective(1.0, builder.shape.num_decodes, builder.cost.num_layers)
        return worth.best((pipelined, *apart))[0]


class Fastest(Policy):
    """Whatever is predicted to bring the most per time, the device alone included.

    The best steady state for the load decides lasting things: the tier of each request and the prompt tokens
    of an iteration. The value of tokens in that steady state decides which decodes join an iteration. (NEO's
    step 6 compares requests over time, which cannot tell how much of a prompt is right.)

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

    def swap(
        self, builder: BatchBuilder, decodes: Sequence[tuple[KVTier, int]], num_starved: int
    ) -> Sequence[int]:
        """As many as hide."""
        return streamed.hidden(builder, decodes, num_starved)

    def prefill_budget(self, builder: BatchBuilder) -> int:
        """As much of prompts as the steady state has, and no less than makes up for reading the weights.

        Where the device has memory for everybody, what counts is that answers begin.
        """
        steady_state = _steady_state(builder)
        if builder.num_running + builder.num_waiting <= builder.most_on_device:
            return builder.budget
        least = max(_worthwhile_tokens(builder) - builder.shape.tokens, SMALLEST_CHUNK_TOKENS)
        missing = min(
            steady_state.num_device - (builder.num_running - builder.num_on_host), builder.num_waiting
        )
        room = max(missing, 0) * builder.mean_prompt_tokens / FILLING_ITERATIONS
        tokens = math.ceil(max(steady_state.chunk_tokens, least, room))
        if steady_state.kind is Kind.PROMPTS_IN_BOTH:
            builder.most_per_prompt = -(-tokens // 2)
        return min(tokens, builder.budget)

    def partition(self, builder: BatchBuilder) -> Partition:
        """Take the best of all candidates."""
        steady_state, num_layers = _steady_state(builder), builder.cost.num_layers
        worth = Objective(1.0, builder.shape.num_decodes, num_layers)
        if builder.chunks:
            rest = (
                builder.shape.num_decodes * steady_state.decode_ms
                + builder.num_chunk_tokens * steady_state.prompt_ms
            )
            worth = Objective(max(steady_state.decode_ms, steady_state.prompt_ms), rest, num_layers)
        partitions = self._candidates(builder)
        if builder.num_starved:
            partitions = (partition for partition in partitions if partition.num_taken)
        return worth.best(partitions)[0]

    def _candidates(self, builder: BatchBuilder) -> Iterator[Partition]:
        generator = _generator(builder)
        yield from generator.with_prompts_in_both()
        may_begin = _steady_state(builder).num_async > 0 or not builder.chunks
        for partition in generator.candidates():
            yield partition
            yield from generator.with_async(
                partition, builder.limits.max_token_ms, workers_only=not may_begin
            )


def _generator(builder: BatchBuilder) -> CandidateGenerator:
    return CandidateGenerator(
        builder.cost,
        builder.shape,
        builder.queue,
        builder.moved_tokens,
        builder.chunks,
        builder.async_decodes,
    )


def _steady_state(builder: BatchBuilder) -> SteadyState:
    assert builder.steady_state is not None
    return builder.steady_state


def _worthwhile_tokens(builder: BatchBuilder) -> int:
    """Return how many tokens an iteration should have, so that reading the weights is not most of it."""
    cost, large = builder.cost, builder.limits.max_batch_tokens
    fixed_ms = cost.iteration_ms / cost.num_layers
    token_ms = (cost.linear_ms(large) + fixed_ms) / large * (1 + MAX_READING_SHARE)
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
    """Return the policy of that name.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is unknown; choose one of: {', '.join(POLICIES)}")
    return POLICIES[name]
