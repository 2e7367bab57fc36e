"""Slots for experts: their content in any format, and the places of experts."""

import numpy as np
import pytest
import torch
from gguf_files import small_rows
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop.models.expert_slots import ExpertSlots
from neo_desktop.models.linear import grouped
from neo_desktop.models.linear.dense import DENSE, Dense
from neo_desktop.models.linear.offloaded import MoveBudget, OffloadedFormat, OffloadedLinear
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.linear.quantised import PartShape
from neo_desktop.models.stored_form import StoredForm

CPU = torch.device("cpu")
COUNT, SLOTS, SIZE = 6, 2, 256
NAMES = ("0.experts_gate", "0.experts_up", "0.experts_down")
PLAIN = Dense(uses_tiles=False)


def matrix(
    name: str, kind: str | None, device_form: WeightFormat, *, has_bias: bool = False
) -> OffloadedLinear:
    rows = COUNT * SIZE
    host_form = DENSE if kind is None else StoredForm(stored={name: (PartShape(kind, rows),)})
    form = OffloadedFormat(device_form, host_form, {name: SLOTS * SIZE}, moves=MoveBudget(0, 0)).named(name)
    made = form.empty(rows, SIZE, has_bias=has_bias, dtype=torch.float32, device=CPU)
    assert isinstance(made, OffloadedLinear)
    if kind is None:
        for row in range(0, rows, 96):
            made.load(row, torch.randn(96, SIZE))
    else:
        raw = small_rows(kind, rows, SIZE, seed=1)
        for row in range(0, rows, 96):
            made.load_stored(row, raw[row : row + 96])
    if has_bias:
        for row in range(0, rows, 96):
            made.load_bias(row, torch.randn(96))
    return made


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", [None, "Q8_0", "Q4_K", "Q6_K", "MXFP4"])
@pytest.mark.parametrize("where", ["floats", "gpu", "cpu"])
def test_a_slot_holds_the_expert_that_was_put_there(kind: str | None, where: str, *, has_bias: bool) -> None:
    forms: dict[str, WeightFormat] = {"floats": PLAIN, "gpu": PLAIN, "cpu": DENSE}
    if kind is not None:
        stored = StoredForm(stored={name: (PartShape(kind, COUNT * SIZE),) for name in NAMES})
        forms |= {"gpu": stored.on_gpu(grouped), "cpu": stored}
    gate, up, down = (matrix(name, kind, forms[where], has_bias=has_bias) for name in NAMES)
    slots = ExpertSlots([(gate, up, down)], COUNT, MoveBudget(0, 0), CPU)
    layer = slots.layers[0]
    room = torch.empty(layer.expert_bytes, dtype=torch.uint8)
    held = list(range(SLOTS))
    for slot, expert in ((None, None), (1, 4), (0, 5), (1, 0)):
        if slot is not None and expert is not None:
            layer.fill(slot, expert, room)
            held[slot] = expert
        for linear in (gate, up, down):
            assert linear.resident is not None
            every = linear.dense().view(COUNT, SIZE, SIZE)
            assert torch.equal(linear.resident.dense().view(SLOTS, SIZE, SIZE), every[held])
            if has_bias:
                assert linear.bias is not None
                assert linear.resident.bias is not None
                biases = linear.bias.view(COUNT, SIZE)
                assert torch.equal(linear.resident.bias.view(SLOTS, SIZE), biases[held])


@given(st.permutations(range(COUNT)), st.integers(0, SLOTS))
def test_each_expert_has_a_place(order: list[int], num_used: int) -> None:
    """Slots come first; a free slot is no expert's place; the others follow in the order of `on_host`."""
    gate = matrix(NAMES[0], None, PLAIN)
    slots = ExpertSlots([(gate, gate, gate)], COUNT, MoveBudget(0, 0), CPU)
    slot_of = np.full((1, COUNT), -1, np.int32)
    slot_of[0, order[:num_used]] = range(num_used)
    slots.place(slot_of)
    (places,) = slots.all_places().tolist()
    layer = slots.layers[0]
    assert [places[expert] for expert in order[:num_used]] == list(range(num_used))
    assert layer.on_host == sorted(order[num_used:])
    assert [places[expert] for expert in layer.on_host] == list(range(SLOTS, SLOTS + COUNT - num_used))
