"""Slots of recurrent states: a request always finds the state of its own tokens."""

import random
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given
from kv_invariants import check_states

from neo_desktop.engine.batch import StateSlots
from neo_desktop.engine.kv.block_pool import BlockHash, extend_hashes
from neo_desktop.engine.kv.states import SLOTS_PER_REQUEST, StateCache

BLOCK_SIZE = 4


@dataclass
class Sequence:
    name: str
    tokens: list[int]
    computed: int
    planned: list[tuple[int, int, list[int]]] = field(default_factory=list)  # start, tokens, draft

    @property
    def hashes(self) -> list[BlockHash]:
        hashes: list[BlockHash] = []
        extend_hashes(hashes, self.tokens, BLOCK_SIZE)
        return hashes


class Slots:
    """Requests over a `StateCache`; a slot's content is the tuple of tokens that its state has seen."""

    def __init__(self, seed: int, num_slots: int) -> None:
        self.rng = random.Random(seed)
        self.cache = StateCache(num_slots, BLOCK_SIZE)
        self.content: list[tuple[int, ...] | None] = [None] * num_slots
        self.running: list[Sequence] = []
        self.made = self.reused = 0
        self.saved: dict[BlockHash, tuple[int, ...] | None] = {}  # on disk
        self.held: dict[str, tuple[BlockHash, int, bool]] = {}  # name -> hash, slot, is to be read

    def admit(self) -> None:
        if not self.cache.has_room:
            return
        self.made += 1
        # Few different tokens: prefixes are often equal.
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randint(1, 20))]
        sequence = Sequence(f"request {self.made}", tokens, 0)
        hashes = sequence.hashes[: (len(tokens) - 1) // BLOCK_SIZE]
        blocks = self.cache.longest(hashes)
        self.cache.admit(sequence.name, hashes[:blocks])
        self.reused += blocks
        sequence.computed = blocks * BLOCK_SIZE
        self.running.append(sequence)

    def plan(self) -> None:
        for sequence in self.running:
            rest = len(sequence.tokens) - sequence.computed
            if len(sequence.planned) == 2 or not rest or (sequence.planned and sequence.planned[-1][2]):
                continue
            if sequence.planned and not self.cache.has_spare():  # a second iteration ahead needs one
                continue
            start, count = sequence.computed, self.rng.randint(1, rest)
            slots = self.cache.plan(sequence.name, start, count, is_last=count == rest)
            draft = [self.rng.randrange(2) for _ in range(self.rng.randrange(4))]
            rows = self.cache.plan_draft(sequence.name, len(draft)) if count == rest == 1 else []
            draft = draft[: len(rows)]
            sequence.planned.append((start, count, draft))
            sequence.computed += count
            self.run(sequence, start, count, slots)
            for number, row in enumerate(rows, 1):
                self.run(Sequence("", [*sequence.tokens, *draft], 0), start + number, 1, row)

    def run(self, sequence: Sequence, start: int, count: int, slots: StateSlots) -> None:
        """Carry out an iteration, or a row of a draft; it may be repeated."""
        for _ in range(self.rng.randint(1, 2)):
            before = () if slots.source < 0 else self.content[slots.source]
            assert before == tuple(sequence.tokens[:start])
            if slots.checkpoint >= 0:
                self.content[slots.checkpoint] = tuple(sequence.tokens[: start + slots.checkpoint_tokens])
            self.content[slots.target] = tuple(sequence.tokens[: start + count])

    def settle(self) -> None:
        for sequence in self.running:
            if sequence.planned:
                start, count, draft = sequence.planned.pop(0)
                num_accepted = self.rng.randint(0, len(draft))
                sequence.tokens += draft[:num_accepted]
                sequence.computed += num_accepted
                self.cache.settle(sequence.name, sequence.hashes, start, count, num_accepted)
                if start + count + num_accepted == len(sequence.tokens):
                    sequence.tokens.append(self.rng.randrange(2))

    def take_back(self) -> None:
        for sequence in self.running:
            if sequence.planned:
                sequence.computed = sequence.planned.pop()[0]
                self.cache.take_back(sequence.name)

    def begin_copy(self) -> None:
        """Begin to write a checkpoint to disk, or to read one that has been written."""
        hashes = [each for sequence in self.running for each in sequence.hashes]
        if not hashes:
            return
        block_hash, name = self.rng.choice(hashes), f"copy {self.made}"
        if name in self.held:
            return
        if self.cache.has(block_hash):
            for slot in self.cache.hold(name, [block_hash]).values():
                self.held[name] = block_hash, slot, False
        elif block_hash in self.saved and (slot := self.cache.expect(name)) is not None:
            self.held[name] = block_hash, slot, True

    def end_copy(self) -> None:
        for name, (block_hash, slot, is_read) in self.held.items():
            if is_read:
                self.content[slot] = self.saved[block_hash]
                self.cache.arrived(name, block_hash)
            else:
                self.saved[block_hash] = self.content[slot]
            self.cache.let_go(name)
        self.held.clear()

    def end(self) -> None:
        if self.running:
            self.cache.free(self.running.pop(self.rng.randrange(len(self.running))).name)


@given(seed=st.integers(0, 2**31), requests=st.integers(1, 4), more=st.integers(0, 6))
def test_every_iteration_reads_the_state_of_its_tokens(seed: int, requests: int, more: int) -> None:
    slots = Slots(seed, requests * SLOTS_PER_REQUEST + more)
    actions = [slots.admit, slots.plan, slots.plan, slots.settle, slots.settle, slots.take_back, slots.end]
    actions += [slots.begin_copy, slots.end_copy]
    for _ in range(150):
        slots.rng.choice(actions)()
        check_states(slots.cache)
    while slots.running:
        slots.end()
        check_states(slots.cache)
    slots.end_copy()
    check_states(slots.cache)
    assert slots.cache.has_room


def test_a_prompt_comes_back_from_its_last_checkpoint() -> None:
    """The same prompt, and the conversation after the answer, continue from states of the first request."""
    cache, tokens = StateCache(8, BLOCK_SIZE), list(range(10))
    first = Sequence("first", tokens, 0)
    cache.admit("first", ())
    cache.plan("first", 0, 10, is_last=True)
    cache.settle("first", first.hashes, 0, 10)
    for token in range(10, 19):
        tokens.append(token)
        cache.plan("first", token, 1, is_last=True)
        cache.settle("first", first.hashes, token, 1)
    assert cache.longest(first.hashes[:2]) == 2
    cache.free("first")
    assert cache.longest(first.hashes) == 4
    check_states(cache)
