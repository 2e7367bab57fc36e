"""Experts in host memory that stream to the device: their results, for any format, pieces and division."""

import pytest
import torch
from gguf_files import STORED, small_rows
from torch import Tensor

from neo_desktop import native
from neo_desktop.models import expert_pieces, operators
from neo_desktop.models.decoder import Experts
from neo_desktop.models.expert_operators import Choice, ExpertScratch, gated
from neo_desktop.models.experts_config import ClampedGate, ExpertsConfig, Gating
from neo_desktop.models.linear.dense import DENSE, Dense, Plain
from neo_desktop.models.linear.offloaded import OffloadedFormat, OffloadedLinear
from neo_desktop.models.linear.protocol import Linear
from neo_desktop.models.linear.quantised import PartShape
from neo_desktop.models.moe import MoE
from neo_desktop.models.stored_form import StoredForm

CPU = torch.device("cpu")
COUNT, RESIDENT, SIZE, PER_TOKEN = 6, 2, 256, 3
KINDS = (None, "Q8_0", "Q4_1", "Q4_K", "Q6_K", "MXFP4")  # None: floats
BYTES = 3 * SIZE * SIZE * 4  # per expert, unpacked


def matrix(name: str, kind: str | None, resident: int, seed: int, *, has_bias: bool) -> Linear:
    rows = COUNT * SIZE
    host_form = DENSE if kind is None else StoredForm(stored={name: (PartShape(kind, rows),)})
    form = OffloadedFormat(Dense(uses_tiles=False), host_form, {name: resident * SIZE}).named(name)
    made = form.empty(rows, SIZE, has_bias=has_bias, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(seed)
    if kind is None:
        made.load(0, torch.randn(rows, SIZE, generator=generator) / SIZE**0.5)
    else:
        assert isinstance(made, OffloadedLinear)
        raw = small_rows(kind, rows, SIZE, seed)
        for row in range(0, rows, SIZE):
            made.load_stored(row, raw[row : row + SIZE])
    if has_bias:
        assert isinstance(made, OffloadedLinear)
        made.load_bias(0, torch.randn(rows, generator=generator))
    return made


def moe_of(kind: str | None, resident: int, gating: Gating, *, has_bias: bool) -> tuple[MoE, Experts]:
    names = ("0.experts_gate", "0.experts_up", "0.experts_down")
    matrices = (matrix(name, kind, resident, i, has_bias=has_bias) for i, name in enumerate(names))
    experts = Experts(Plain(torch.zeros(COUNT, SIZE)), *matrices)
    config = ExpertsConfig(COUNT, PER_TOKEN, SIZE, (0,), gating=gating)
    return MoE((experts.gate, experts.up, experts.down), config, operators), experts


def expected_of(experts: Experts, gating: Gating, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the MoE output, computed row by row and expert by expert."""
    gates, ups, downs = (
        (each.dense().view(COUNT, SIZE, SIZE), torch.zeros(COUNT * SIZE) if each.bias is None else each.bias)
        for each in (experts.gate, experts.up, experts.down)
    )

    def product(of: tuple[Tensor, Tensor], expert: int, given: Tensor) -> Tensor:
        return of[0][expert] @ given + of[1].view(COUNT, SIZE)[expert]

    out = torch.zeros_like(x)
    for row, chosen in enumerate(ids.tolist()):
        for slot, expert in enumerate(chosen):
            gate, up = product(gates, expert, x[row]), product(ups, expert, x[row])
            out[row] += weights[row, slot] * product(downs, expert, gated(gate, up, gating))
    return out


@pytest.mark.parametrize("step", [1, 2, 9])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("resident", [0, RESIDENT])
def test_device_bus_and_cpu_together_make_what_all_experts_make(
    kind: str | None, resident: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results agree at any share; streamed experts are as exact on the device as floats."""
    monkeypatch.setattr(expert_pieces, "PIECE_BYTES", step * BYTES)
    gating: Gating = ClampedGate() if step == 2 else "gelu" if step == 9 else "silu"
    moe, experts = moe_of(kind, resident, gating, has_bias=step == 2)
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(9, SIZE, generator=generator)
    ids = torch.rand(len(x), COUNT, generator=generator).argsort(1)[:, :PER_TOKEN].int()
    weights = torch.rand(len(x), PER_TOKEN, generator=generator)
    expected = expected_of(experts, gating, x, ids, weights)
    for streamed in range(COUNT - resident + 1):
        room = scratch(ids, weights)
        pieces = moe.pieces(streamed, torch.float32)
        assert [piece.count for piece in pieces] == [
            min(step, streamed - first) for first in range(0, streamed, step)
        ]
        found = torch.full_like(x, torch.nan)
        if moe.has_device_part:
            moe.multiply_on_device(x, room, found)
        for index, piece in enumerate(pieces):
            staged = torch.cat(list(piece.sources))
            assert len(staged) == piece.nbytes
            numbers = torch.full((piece.elements,), torch.nan)
            adds = index > 0 or moe.has_device_part
            moe.multiply_piece(piece, staged, numbers, x, room, found, adds=adds)
        if streamed == COUNT - resident:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            continue
        moe.find_host_ids(room, streamed)
        by_cpu = torch.full_like(x, torch.nan)
        assert moe.on_host is not None
        memory = room.gate_up, room.gated, room.products
        native.multiply_experts(moe.on_host, x, room.choice.host_ids, weights, *memory, by_cpu)
        found = by_cpu if not streamed and not resident else found + by_cpu
        # The CPU rounds the inputs of quantised matmuls to 8 bits.
        assert (found - expected).norm() < (1e-5 if kind is None else 0.02) * expected.norm()


def scratch(ids: Tensor, weights: Tensor) -> ExpertScratch:
    pairs = ids.numel()
    rooms = (torch.full((pairs, width), torch.nan) for width in (2 * SIZE, SIZE, SIZE))
    choice = Choice(ids, weights, torch.empty_like(ids))
    return ExpertScratch(torch.empty(0), choice, *rooms, per_token=PER_TOKEN)


def test_a_piece_is_one_expert_at_least_and_as_many_as_it_has_room_for() -> None:
    moe, _ = moe_of("Q4_K", RESIDENT, "silu", has_bias=False)
    (piece,) = moe.pieces(3, torch.float32)
    assert (piece.first, piece.count, piece.elements) == (RESIDENT, 3, 3 * BYTES // 4)
    assert piece.nbytes < piece.elements * 0.65  # in its stored format
    assert STORED["Q4_K"].nbytes * piece.elements // 256 <= piece.nbytes
