"""Slots for the states of recurrent layers: current states of requests, and checkpoints for reuse.

An iteration reads a request's state from one slot and writes it to another, so it can be repeated or
discarded. A checkpoint is the state after a block boundary, findable by the hash of the block before it; a
prefix of the prompt is reused up to a block that has KV and a checkpoint.

    slots of a request:   current ── source of a running iteration ── its target = the new current
                          mark: the state at the last block boundary; it becomes a checkpoint in the end
                          drafts: the states after the target and each token of a draft; in the end, the one
                          after the last right token becomes current
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from neo_desktop.engine.batch import StateSlots
from neo_desktop.engine.kv.block_pool import BlockHash, BlockPool

SLOTS_PER_REQUEST = 2  # the source and target of an iteration
NO_SLOT = -1


@dataclass(slots=True)
class _Owned:
    """The slots of one request."""

    current: int  # its state after all planned iterations; NO_SLOT: empty
    planned: deque[StateSlots] = field(default_factory=deque)  # of iterations without a result
    mark: tuple[int, BlockHash] | None = None

    @property
    def num_chained(self) -> int:
        """Slots of its planned iterations, and of the state after them."""
        chain = self.current, *(slots.source for slots in self.planned)
        return sum(slot != NO_SLOT for slot in chain)


class StateCache:
    """Slots `0 .. num_slots - 1`, the blocks of a pool; checkpoints are its cached blocks."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.num_slots, self._block_size = num_slots, block_size
        self._pool = BlockPool(num_slots, run=1)
        self._owned: dict[str, _Owned] = {}
        self._held: dict[str, list[int]] = {}  # slots that are read or written beside the iterations

    @property
    def most_requests(self) -> int:
        """The number of requests that may run at the same time."""
        return self.num_slots // SLOTS_PER_REQUEST

    @property
    def has_room(self) -> bool:
        planned = [slots for each in self._owned.values() for slots in each.planned]
        num_taken = sum(max(each.num_chained, SLOTS_PER_REQUEST) for each in self._owned.values())
        num_taken += sum((slots.checkpoint != NO_SLOT) + len(slots.drafts) for slots in planned)
        num_taken += sum(map(len, self._held.values()))
        return num_taken + SLOTS_PER_REQUEST <= self.num_slots

    def has_spare(self, count: int = 1) -> bool:
        """Return True if `count` slots can be taken beside those that the requests are sure to need."""
        needed = sum(max(SLOTS_PER_REQUEST - each.num_chained, 0) for each in self._owned.values())
        return self._pool.num_free_blocks >= needed + count

    def longest(self, hashes: Sequence[BlockHash]) -> int:
        """Return the number of leading blocks that end at a checkpoint."""
        return next((n for n in range(len(hashes), 0, -1) if self.has(hashes[n - 1])), 0)

    def has(self, block_hash: BlockHash) -> bool:
        return self._pool.find(block_hash) is not None

    def hold(self, name: str, hashes: Sequence[BlockHash]) -> dict[BlockHash, int]:
        """Keep checkpoints until `let_go`, as far as requests can spare the slots; return `hash -> slot`."""
        found = {}
        for block_hash in hashes:
            slot = self._pool.find(block_hash)
            if slot is not None and self.has_spare():
                self._pool.share(slot)
                found[block_hash] = slot
        self._held[name] = list(found.values())
        return found

    def expect(self, name: str) -> int | None:
        """Return a slot for a checkpoint that arrives before `let_go`; None: requests can spare none."""
        if not self.has_spare():
            return None
        slot = self._take()
        self._held[name] = [slot]
        return slot

    def arrived(self, name: str, block_hash: BlockHash) -> None:
        """Publish the checkpoint for which `expect` gave a slot."""
        self._pool.publish(self._held[name][0], block_hash)

    def let_go(self, name: str) -> None:
        """Release the slots under a name; do nothing if there are none."""
        for slot in self._held.pop(name, ()):
            self._release(slot)

    def admit(self, request_id: str, hashes: Sequence[BlockHash]) -> None:
        """Start a request at the checkpoint after these blocks; no blocks: at an empty state."""
        current = NO_SLOT
        if hashes:
            found = self._pool.find(hashes[-1])
            assert found is not None  # the request's KV is reused up to a checkpoint
            current = found
            self._pool.share(current)
        self._owned[request_id] = _Owned(current)

    def plan(self, request_id: str, start: int, num_tokens: int, is_last: bool) -> StateSlots:
        """Return the slots of a request's next iteration, which computes `num_tokens` tokens from `start` on.

        Args:
            is_last: it computes the last known token; a prompt then leaves a checkpoint before its end.
        """
        owned, end = self._owned[request_id], start + num_tokens
        slots = StateSlots(owned.current, self._take())
        boundary = (end - 1) // self._block_size * self._block_size
        if num_tokens > 1 and boundary > start and (is_last or end % self._block_size) and self.has_spare():
            slots = slots._replace(checkpoint=self._take(), checkpoint_tokens=boundary - start)
        owned.planned.append(slots)
        owned.current = slots.target
        return slots

    def is_planned(self, request_id: str) -> bool:
        """Return True if an iteration of the request has no result; the simulator plans none."""
        return bool(self._owned[request_id].planned)

    def under_way(self, request_id: str) -> StateSlots:
        """Return the slots of an async decode in flight, which are those of its first async step."""
        return self._owned[request_id].planned[-1]

    def plan_draft(self, request_id: str, num_tokens: int) -> list[StateSlots]:
        """Return the slots of a draft's tokens, after `plan`; fewer than `num_tokens` if slots are short."""
        owned = self._owned[request_id]
        slots = owned.planned[-1]
        chain = [slots.target]
        while len(chain) <= num_tokens and self.has_spare():
            chain.append(self._take())
        owned.planned[-1] = slots._replace(drafts=tuple(chain[1:]))
        return [StateSlots(source, target) for source, target in pairwise(chain)]

    def settle(
        self,
        request_id: str,
        hashes: Sequence[BlockHash],
        start: int,
        num_tokens: int,
        num_accepted: int = 0,
    ) -> None:
        """Apply the success of a request's oldest planned iteration; arguments as in `plan`.

        Args:
            num_accepted: right tokens of its draft.
        """
        owned = self._owned[request_id]
        slots = owned.planned.popleft()
        self._release(slots.source)
        if slots.drafts:  # no later iteration is planned
            states = (slots.target, *slots.drafts)
            owned.current = states[num_accepted]
            for number, slot in enumerate(states[: num_accepted + 1], 1):
                self._note(owned, slot, hashes, start + number, is_chunk=False)
            for slot in states:
                if slot != owned.current:
                    self._release(slot)
            return
        if slots.checkpoint != NO_SLOT:
            self._publish(slots.checkpoint, hashes, start + slots.checkpoint_tokens)
            self._release(slots.checkpoint)
        self._note(owned, slots.target, hashes, start + num_tokens, is_chunk=num_tokens > 1)

    def _note(
        self, owned: _Owned, slot: int, hashes: Sequence[BlockHash], end: int, *, is_chunk: bool
    ) -> None:
        """Publish or mark the state after `end` tokens, if that is a block boundary."""
        if end % self._block_size or end // self._block_size > len(hashes):
            return
        if is_chunk:
            self._publish(slot, hashes, end)
        elif self.has_spare(1 + len(self._owned)):  # each request may be planned ahead beside the mark
            self._drop_mark(owned)
            self._pool.share(slot)
            owned.mark = slot, hashes[end // self._block_size - 1]

    def take_back(self, request_id: str) -> None:
        """Discard a request's newest planned iteration."""
        owned = self._owned[request_id]
        slots = owned.planned.pop()
        for slot in (slots.target, slots.checkpoint, *slots.drafts):
            self._release(slot)
        owned.current = slots.source

    def free(self, request_id: str) -> None:
        """Release a request's slots; the state at its last block boundary stays as a checkpoint."""
        owned = self._owned.pop(request_id)
        if owned.mark is not None:
            slot, block_hash = owned.mark
            self._pool.publish(slot, block_hash)
            self._release(slot)
        for slots in owned.planned:
            for slot in (slots.source, slots.checkpoint, *slots.drafts):
                self._release(slot)
        self._release(owned.current)

    def _take(self) -> int:
        if not self._pool.num_free_blocks:
            for owned in self._owned.values():  # marks are optional
                self._drop_mark(owned)
        return self._pool.allocate()

    def _drop_mark(self, owned: _Owned) -> None:
        if owned.mark is not None:
            self._release(owned.mark[0])
            owned.mark = None

    def _publish(self, slot: int, hashes: Sequence[BlockHash], tokens: int) -> None:
        if 0 < tokens // self._block_size <= len(hashes):
            self._pool.publish(slot, hashes[tokens // self._block_size - 1])

    def _release(self, slot: int) -> None:
        if slot != NO_SLOT:
            self._pool.release(slot)
