"""Experts get slots as a model of the rule in plain lists says, within the budget, and if it pays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from neo_desktop.engine.predict import expert_places
from neo_desktop.engine.predict.expert_places import ExpertPlaces, Move, move_budget
from neo_desktop.engine.predict.offloaded_matmul import Rates, Sizes
from neo_desktop.models.linear.offloaded import MoveBudget

COUNT = 7  # experts of a layer


class ByLists:
    """The same rule for planned places, one expert at a time."""

    def __init__(self, num_slots: list[int], sizes: list[int], most: float) -> None:
        self.planned = [set(range(slots)) for slots in num_slots]
        self._uses = [[[0, 0] for _ in range(COUNT)] for _ in num_slots]  # per expert, the last uses
        self._sizes, self._most, self._now = sizes, most, 0

    def record(self, asked: list[set[int]]) -> None:
        self._now += 1
        for uses, chosen in zip(self._uses, asked, strict=True):
            for expert in chosen:
                uses[expert].append(self._now)
        again = [
            (self._uses[layer][expert][-2], layer, expert)
            for layer, chosen in enumerate(asked)
            for expert in sorted(chosen - self.planned[layer])
        ]
        left = self._most
        for before, layer, expert in sorted(again, key=lambda each: -each[0]):
            uses = self._uses[layer]
            oldest = min(self.planned[layer], key=lambda each: (uses[each][-1], each))
            if uses[oldest][-1] < before:
                if self._sizes[layer] > left:
                    break
                left -= self._sizes[layer]
                self.planned[layer] = self.planned[layer] - {oldest} | {expert}


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[int], list[int], float, list[list[set[int]]]]:
    """Draw slots and bytes per layer, a budget, and the chosen experts of some iterations."""
    layers = draw(st.integers(1, 3))
    sizes = st.lists(st.integers(1, 4), min_size=layers, max_size=layers)
    slots = st.lists(st.integers(1, COUNT - 1), min_size=layers, max_size=layers)
    chosen = st.lists(
        st.sets(st.integers(0, COUNT - 1), min_size=1, max_size=3), min_size=layers, max_size=layers
    )
    return (
        draw(slots),
        draw(sizes),
        draw(st.sampled_from([0, 1, 3, 6, 100])),
        draw(st.lists(chosen, max_size=30)),
    )


def places_of(num_slots: list[int], sizes: list[int], most: float) -> ExpertPlaces:
    numbers = np.tile(np.arange(COUNT, dtype=np.int32), (len(num_slots), 1))
    first = np.where(numbers < np.array(num_slots)[:, None], numbers, -1)
    return ExpertPlaces(first, num_slots, sizes, MoveBudget(most, most))


def as_mask(asked: list[set[int]]) -> NDArray[np.bool_]:
    return np.array([[expert in chosen for expert in range(COUNT)] for chosen in asked])


@given(runs(), st.lists(st.sampled_from(["moves", "fails", "waits"]), min_size=30, max_size=30))
def test_an_expert_asked_for_again_replaces_the_least_recently_used(
    run: tuple[list[int], list[int], float, list[list[set[int]]]], fates: list[str]
) -> None:
    """Slots follow the rule within the budget, also after failed copies; no two experts share a slot."""
    num_slots, sizes, most, iterations = run
    places, model = places_of(num_slots, sizes, most), ByLists(num_slots, sizes, most)
    in_step = True  # no copy was missed
    for asked, fate in zip(iterations, fates, strict=False):
        places.record(as_mask(asked))
        model.record(asked)
        places.moves_experts = True  # whether it pays or not
        moves = [] if fate == "waits" else places.moves()
        assert sum(sizes[move.layer] for move in moves) <= most
        _check(places, num_slots, moves)
        places.finish(moves, arrived=fate == "moves")
        _check(places, num_slots, [])
        in_step = in_step and (fate == "moves" or (not moves and fate == "fails"))
        if in_step:
            assert [set(np.flatnonzero(row >= 0)) for row in places.slots] == model.planned
    for _ in range(COUNT * len(num_slots)):  # the missed copies follow
        moves = places.moves()
        places.finish(moves, arrived=True)
    if most >= max(sizes):
        wanted = model.planned if places.moves_experts else [set(range(slots)) for slots in num_slots]
        assert [set(np.flatnonzero(row >= 0)) for row in places.slots] == wanted


def _check(places: ExpertPlaces, num_slots: list[int], moves: list[Move]) -> None:
    for layer, (row, slots) in enumerate(zip(places.slots, num_slots, strict=True)):
        used = [slot for slot in row.tolist() if slot >= 0]
        used += [move.slot for move in moves if move.layer == layer]
        assert len(used) == len(set(used))
        assert all(slot < slots for slot in used)
    assert all(places.slots[move.layer, move.expert] < 0 for move in moves)


def test_no_more_experts_move_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_places, "MOST_MOVES", 2)
    places = places_of([3, 3], [1, 1], 100)
    for _ in range(2):
        places.record(as_mask([{3, 4, 5}, {3, 4, 5}]))
    places.moves_experts = True
    assert len(places.moves()) == 2


def test_experts_return_when_moving_no_longer_pays() -> None:
    """A chat uses three experts, then the first three again."""
    places = places_of([3], [1], 100)

    def run(chosen: set[int], times: int) -> None:
        for _ in range(times):
            moves = places.moves()
            places.finish(moves, arrived=True)
            places.record(as_mask([chosen]))

    run({4, 5, 6}, 50)
    assert places.slots[0, 4:].min() >= 0
    run({0, 1, 2}, 500)
    assert places.slots[0, :3].min() >= 0
    assert not places.moves_experts


def test_the_budget_leaves_bandwidth_to_the_cpu() -> None:
    """The CPU reads 40 of 50 GB/s, so that a fifth of the time's bytes are free; the bus is faster."""
    rates = Rates(40e9, 1e15, 32e9, 1e12, 1e15, 0.0, host_bytes_per_s=50e9)
    sizes = Sizes(100, 10**6, 10**8, 10**8, 0, unit=1, used_share=0.1, handed=1)
    most, free, price = move_budget(rates, [(sizes, 20), (sizes, 60)])
    read = 0.1 * (0.8 + 0.4) * 1e8
    assert free == pytest.approx(read / 4, rel=1e-3)
    assert most == pytest.approx(0.5 * read * 32 / 40, rel=1e-3)
    assert price == pytest.approx(3 * 40 / 1000)
