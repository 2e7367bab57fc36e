"""Policies: where requests may live, and the decisions that are not the same for all.

admits   whether a prompt for which the preferred place has no room may live in another
spills   whether a request that must leave the preferred place may go on in another, or waits
pace     how many tokens of prompts join an iteration beside the host's decodes
swap     which decodes whose KV lies in host memory the device attends for
divide   which decodes of the queue join which sub-batch
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from neo_desktop.engine.placement import ALL_PLACES, PLACES, Place
from neo_desktop.engine.schedule import swapping
from neo_desktop.engine.schedule.draft import Draft
from neo_desktop.engine.schedule.regime import Kind, Regime
from neo_desktop.engine.schedule.split import Outlook, Split, Worth

SMALLEST_CHUNK_TOKENS = 64  # of a prompt, where CPU decodes set the pace
SURPLUS = 1.25  # how many more requests than it needs may live in host memory
FILLING_ITERATIONS = 32  # in which the device's free memory gets its prompts
MAX_READING_SHARE = 0.15  # by which tokens of an iteration with prompts may take longer than in a large one


@dataclass(frozen=True)
class Policy:
    """Everything that has room in one batch; the places come with the most preferred one first."""

    name: str
    places: tuple[Place, ...]
    needs_predictions = False  # whether its decisions depend on a cost model
    needs_regime = False  # whether drafts tell what is best in the long run

    @property
    def swaps(self) -> bool:
        """Whether KV of host memory may come to the device to be attended to."""
        return any(place.is_swapped for place in self.places)

    def with_places(self, more: Iterable[Place]) -> Self:
        """Return the policy with further places, behind its own."""
        return replace(self, places=(*self.places, *more))

    def admits(self, draft: Draft, place: Place, num_tokens: int) -> bool:
        """Whether a prompt of so many tokens may live in a place that is not the preferred one."""
        return True

    def spills(self, draft: Draft, place: Place, num_tokens: int) -> bool:
        """Whether a request may go on in such a place; the draft is what the preferred one would keep."""
        return True

    def pace(self, draft: Draft) -> int:
        """Return how many tokens of prompts join."""
        return draft.budget

    def swap(self, draft: Draft, decodes: Sequence[tuple[Place, int]], num_due: int) -> Sequence[int]:
        """Return the positions of those that join; see `swapping.hidden`."""
        return range(len(decodes))

    def divide(self, draft: Draft) -> Split:
        """Divide the queue."""
        return _outlook(draft).together()


class Swapping(Policy):
    """The device attends for all, and KV in host memory comes to it layer by layer: Pie.

    As much of it as hides behind the device's work, as predicted and corrected by what the bus really takes.
    """

    needs_predictions = True

    def admits(self, draft: Draft, place: Place, num_tokens: int) -> bool:
        """As long as nobody waits for copies."""
        return swapping.admits(draft, place, num_tokens)

    def swap(self, draft: Draft, decodes: Sequence[tuple[Place, int]], num_due: int) -> Sequence[int]:
        """Likewise."""
        return swapping.hidden(draft, decodes, num_due)


class Halves(Policy):
    """Two sub-batches with equal attention on the host: FastDecode."""

    def divide(self, draft: Draft) -> Split:
        """Divide the queue."""
        return _outlook(draft).halves()


class Hidden(Policy):
    """NEO's six steps: the host hides behind the device, or waits."""

    needs_predictions = True

    def admits(self, draft: Draft, place: Place, num_tokens: int) -> bool:
        """Step 5: nobody joins while the host has more to do than hides, unless more hides beside it."""
        outlook = _outlook(draft)
        num_hidden = sum(map(len, outlook.fill(draft.num_due)))
        if num_hidden == len(draft.queue):
            return True
        tokens = min(num_tokens, draft.budget)
        load = draft.load._replace(tokens=draft.load.tokens + tokens)
        beside = Outlook(draft.cost, load, draft.queue, draft.moved_tokens)
        return sum(map(len, beside.fill(draft.num_due))) > num_hidden

    def divide(self, draft: Draft) -> Split:
        """Steps 4 and 6, with NEO's measure: requests over time."""
        outlook = _outlook(draft)
        split = outlook.hidden(draft.num_due)
        if not draft.load.tokens:
            # Where nothing hides, waiting would not help anybody.
            return split if split.num_taken else outlook.halves()
        if draft.num_due or not split.num_taken:
            return split
        worth = Worth(decode=1.0, rest=draft.load.num_decodes + len(draft.chunks))
        return worth.best((split, outlook.front(0, 0)))[0]


class Apart(Hidden):
    """APEX: NEO's two sub-batches, or one, beside which the host's decodes go at their own pace.

    Beside prompts as NEO. Without them, whatever brings more requests forward per time.
    """

    def divide(self, draft: Draft) -> Split:
        """Compare the two, for decodes alone."""
        pipelined = super().divide(draft)
        if draft.chunks or draft.num_due or not draft.load.tokens:
            return pipelined
        outlook = _outlook(draft)
        apart = outlook.with_staggered(outlook.front(0, 0), draft.limits.max_token_ms)
        worth = Worth(1.0, draft.load.num_decodes, draft.cost.num_layers)
        return worth.best((pipelined, *apart))[0]


class Fastest(Policy):
    """Whatever is predicted to bring the most per time, the device alone included.

    What lasts, who lives where and how much of prompts an iteration computes, follows from the regime that is
    best for the load; which decodes join an iteration, from what tokens are worth in that regime. (NEO's step
    6 compares requests over time; that cannot tell how much of a prompt is right.)

    No regime has decodes of workers at their own pace: it would have to fill the workers' memory first, which
    runs of some hundred requests do not pay back. Who lives there anyway goes so in any iteration that is
    better for it.
    """

    needs_predictions = True
    needs_regime = True

    def admits(self, draft: Draft, place: Place, num_tokens: int) -> bool:
        """As many as the regime has there, and some more, so that there are always prompts to compute."""
        if place.is_swapped:
            has_room = draft.num_swapped < SURPLUS * _regime(draft).num_swapped
            return has_room and swapping.admits(draft, place, num_tokens)
        return not place.host_attends or draft.num_on_host < SURPLUS * _regime(draft).num_on_host

    def spills(self, draft: Draft, place: Place, num_tokens: int) -> bool:
        """Wherever the regime has anybody: a full host still saves the KV. Rather where it is attended to."""
        if place.is_swapped:
            return not _regime(draft).num_on_host or self.admits(draft, place, num_tokens)
        return not place.host_attends or _regime(draft).num_on_host > 0

    def swap(self, draft: Draft, decodes: Sequence[tuple[Place, int]], num_due: int) -> Sequence[int]:
        """As many as hide."""
        return swapping.hidden(draft, decodes, num_due)

    def pace(self, draft: Draft) -> int:
        """As much of prompts as the regime has, and no less than makes up for reading the weights.

        Where the device has memory for everybody, what counts is that answers begin.
        """
        regime = _regime(draft)
        if draft.num_running + draft.num_waiting <= draft.most_on_device:
            return draft.budget
        least = max(_worthwhile_tokens(draft) - draft.load.tokens, SMALLEST_CHUNK_TOKENS)
        missing = min(regime.num_device - (draft.num_running - draft.num_on_host), draft.num_waiting)
        room = max(missing, 0) * draft.mean_prompt_tokens / FILLING_ITERATIONS
        tokens = math.ceil(max(regime.chunk_tokens, least, room))
        if regime.kind is Kind.PROMPTS_IN_BOTH:
            draft.most_per_prompt = -(-tokens // 2)
        return min(tokens, draft.budget)

    def divide(self, draft: Draft) -> Split:
        """Take the best of all candidates."""
        regime, num_layers = _regime(draft), draft.cost.num_layers
        worth = Worth(1.0, draft.load.num_decodes, num_layers)
        if draft.chunks:
            rest = draft.load.num_decodes * regime.decode_ms + draft.num_chunk_tokens * regime.prompt_ms
            worth = Worth(max(regime.decode_ms, regime.prompt_ms), rest, num_layers)
        splits = self._candidates(draft)
        if draft.num_due:
            splits = (split for split in splits if split.num_taken)
        return worth.best(splits)[0]

    def _candidates(self, draft: Draft) -> Iterator[Split]:
        outlook = _outlook(draft)
        yield from outlook.with_prompts_in_both()
        may_begin = _regime(draft).num_staggered > 0 or not draft.chunks
        for split in outlook.candidates():
            yield split
            yield from outlook.with_staggered(split, draft.limits.max_token_ms, workers_only=not may_begin)


def _outlook(draft: Draft) -> Outlook:
    return Outlook(draft.cost, draft.load, draft.queue, draft.moved_tokens, draft.chunks, draft.staggered)


def _regime(draft: Draft) -> Regime:
    assert draft.regime is not None
    return draft.regime


def _worthwhile_tokens(draft: Draft) -> int:
    """Return how many tokens an iteration should have, so that reading the weights is not most of it."""
    cost, large = draft.cost, draft.limits.max_batch_tokens
    fixed_ms = cost.iteration_ms / cost.num_layers
    token_ms = (cost.linear_ms(large) + fixed_ms) / large * (1 + MAX_READING_SHARE)
    return bisect_left(
        range(1, large), 1, key=lambda tokens: cost.linear_ms(tokens) + fixed_ms <= token_ms * tokens
    )


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("gpu-only", (Place.DEVICE,)),
        Halves("fastdecode", (Place.HOST,)),
        Hidden("neo", PLACES),
        Apart("apex", PLACES),
        Swapping("pie", (Place.DEVICE, Place.SWAPPED)),
        Fastest("auto", ALL_PLACES),
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
