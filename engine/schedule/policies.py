"""Policies: where requests may live, and the decisions that are not the same for all.

admits   whether a prompt for which the preferred place has no room may live in another
spills   whether a request that must leave the preferred place may go on in another, or waits
pace     how many tokens of prompts join an iteration beside the host's decodes
divide   which decodes of the queue join which sub-batch
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from neo_desktop.engine.placement import PLACES, Place
from neo_desktop.engine.predict.estimate import Decodes, Load, device_attention_ms, iteration_ms
from neo_desktop.engine.schedule.draft import Draft, HostQueue
from neo_desktop.engine.schedule.split import Outlook, Split, Worth

SMALLEST_CHUNK_TOKENS = 64  # of a prompt, where CPU decodes set the pace
MAX_REREAD_SHARE = 0.12  # of an iteration with prompts that reading the weights again may take


@dataclass(frozen=True)
class Policy:
    """Everything that has room in one batch; the places come with the most preferred one first."""

    name: str
    places: tuple[Place, ...]
    needs_predictions = False  # whether its decisions depend on a cost model

    def admits(self, draft: Draft, place: Place, num_tokens: int) -> bool:
        """Whether a prompt of so many tokens may live in a place that is not the preferred one."""
        return True

    def spills(self, draft: Draft, place: Place, num_tokens: int) -> bool:
        """Whether a request may go on in such a place; the draft is what the preferred one would keep."""
        return True

    def pace(self, draft: Draft) -> int:
        """Return how many tokens of prompts join."""
        return draft.budget

    def divide(self, draft: Draft) -> Split:
        """Divide the queue."""
        return _outlook(draft).together()


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
        beside = Outlook(draft.cost, load, draft.queue, draft.swapped_tokens)
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
        num_prompts = sum(1 for _ in draft.prompts)
        worth = Worth(decode=1.0, rest=draft.load.num_decodes + num_prompts)
        return worth.best((split, outlook.front(0, 0)))[0]


class Fastest(Policy):
    """Whatever is predicted to bring the most per time, the device alone included.

    The worth of an iteration is the time that its work would take on the device alone: a decode has its share
    of an iteration of the device's decodes, a prompt's token what it adds to a large batch. (NEO's step 6
    compares requests over time; that cannot tell how much of a prompt is right.)
    """

    needs_predictions = True

    def admits(self, draft: Draft, place: Place, num_tokens: int) -> bool:
        """Compare what follows once it is prefilled, beside chunks of further prompts if there are any."""
        load, queue = draft.when_prefilled()
        num_chunk_tokens = _least_chunk_tokens(draft) if draft.num_waiting > 1 else 0
        tokens = min(num_tokens, draft.budget)
        bus_ms = draft.cost.transfer_ms(draft.swapped_tokens + tokens)
        if bus_ms > draft.cost.linear_ms(draft.load.tokens + tokens):  # it would hold the device up
            return False
        return self._pays(draft, load, queue, place, num_tokens, num_chunk_tokens)

    def spills(self, draft: Draft, place: Place, num_tokens: int) -> bool:
        """Compare what the preferred place does with what the host adds; a full host still saves the KV."""
        return self._pays(draft, draft.load, HostQueue(()), place, num_tokens, 0)

    def pace(self, draft: Draft) -> int:
        """As many as keep the device busy for as long as the host is, but not so few that weights are most.

        Worth over time must not decide this: where the device has few decodes, each is worth so much that
        prompts would starve, and with them the decodes to come.
        """
        if not len(draft.queue):
            return draft.budget
        cost = draft.cost
        missing_ms = (
            draft.queue.host_ms(cost, 0, len(draft.queue))
            - cost.linear_ms(len(draft.queue))
            - device_attention_ms(cost, draft.load)
        )
        paces = range(_least_chunk_tokens(draft), draft.budget, SMALLEST_CHUNK_TOKENS)
        enough = bisect_left(paces, missing_ms, key=lambda tokens: cost.linear_ms(draft.load.tokens + tokens))
        return paces[enough] if enough < len(paces) else draft.budget

    def divide(self, draft: Draft) -> Split:
        """Take the best of all candidates."""
        splits: Iterable[Split] = _outlook(draft).candidates()
        if draft.num_due:
            splits = (split for split in splits if split.num_taken)
        _, tokens = draft.queue.contexts[0] if len(draft.queue) else (None, 1)
        return self._worth(draft, draft.load, draft.num_chunk_tokens, tokens).best(splits)[0]

    def _pays(
        self, draft: Draft, load: Load, queue: HostQueue, place: Place, num_tokens: int, num_chunk_tokens: int
    ) -> bool:
        """Whether the best plan would take more than the queue, if there were any number of such decodes.

        A few decodes alone never make up for reading the weights a second time, but they must come before
        the many.
        """
        load = load._replace(tokens=load.tokens + num_chunk_tokens)
        worth = self._worth(draft, load, num_chunk_tokens, num_tokens)
        num_more = max(draft.limits.max_batch_requests - len(queue), 1)
        mean_tokens = (queue.tokens(0, len(queue)) + num_tokens) // (len(queue) + 1)
        full = Outlook(draft.cost, load, queue.followed_by(place, mean_tokens, num_more))
        return worth.best(full.candidates())[0].num_taken > len(queue)

    def _worth(self, draft: Draft, load: Load, num_chunk_tokens: int, other_context_tokens: int) -> Worth:
        """Return what the device's part and each decode of the queue are worth.

        Args:
            other_context_tokens: the context of the single decode in it where the device has none.
        """
        cost = draft.cost
        alone = Load().plus(load.decodes)
        if not alone.tokens:
            alone = Load().plus({self.places[0]: Decodes(1, other_context_tokens)})
        decode_ms = iteration_ms(cost, alone) / alone.tokens
        prompts_ms = cost.num_layers * (num_chunk_tokens * _token_ms(draft) + load.prefill_ms)
        return Worth(decode_ms, load.num_decodes * decode_ms + prompts_ms)


def _outlook(draft: Draft) -> Outlook:
    return Outlook(draft.cost, draft.load, draft.queue, draft.swapped_tokens)


def _token_ms(draft: Draft) -> float:
    """Return what one more token adds to the linear stages of a layer in a large batch."""
    large = draft.limits.max_batch_tokens
    return (draft.cost.linear_ms(large) - draft.cost.linear_ms(large // 2)) / (large - large // 2)


def _least_chunk_tokens(draft: Draft) -> int:
    """Return how many tokens of prompts should join at least beside the host's decodes.

    A second sub-batch reads the weights once more: next to a large chunk that costs little.
    """
    token_ms = _token_ms(draft)
    if token_ms <= 0:
        return draft.limits.max_batch_tokens
    return min(int(draft.cost.linear_ms(1) / token_ms / MAX_REREAD_SHARE), draft.limits.max_batch_tokens)


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("gpu-only", (Place.DEVICE,)),
        Halves("fastdecode", (Place.HOST,)),
        Hidden("neo", PLACES),
        Fastest("auto", PLACES),
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
