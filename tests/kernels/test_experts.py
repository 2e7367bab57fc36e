"""MoE on a GPU: the choice of experts equals float64's, and sums are as exact as float32's."""

from functools import partial

import pytest
import torch
from fallback_levels import Levels
from gguf_files import STORED, small_rows
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.kernels.in_triton import experts as in_triton
from neo_desktop.models.expert_operators import Choice, ExpertScratch
from neo_desktop.models.experts_config import ClampedGate, Gating
from neo_desktop.models.linear.grouped import Grouped
from neo_desktop.models.linear.stacked import Stacked, StackedExperts
from neo_desktop.models.linear.unpack import load_stored

pytestmark = pytest.mark.usefixtures("kernel_level")
DTYPES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
HIDDEN, INTERMEDIATE = 64, 64
ACTIVATIONS = {"silu": silu, "gelu": partial(gelu, approximate="tanh"), "relu": relu}


def made(
    count: int,
    type_name: str | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_bias: bool = True,
    gating: Gating = "silu",
) -> tuple[StackedExperts, list[tuple[Tensor, Tensor]]]:
    """Return experts, with their matrices [experts, rows, columns] and biases [experts, rows] in float64."""
    generator = torch.Generator().manual_seed(count)
    columns = {"gate": HIDDEN, "up": HIDDEN, "down": INTERMEDIATE}
    if type_name is not None and STORED[type_name].elements > INTERMEDIATE:
        columns = dict.fromkeys(columns, STORED[type_name].elements)
    found, exact = {}, []
    for index, (name, width) in enumerate(columns.items()):
        rows = columns["gate"] if name == "down" else columns["down"]
        bias = torch.randn(count * rows, generator=generator).to(dtype) if has_bias else None
        weight: Tensor | Grouped
        if type_name is None:
            numbers = torch.randn(count * rows, width, generator=generator) / width**0.5
            weight, floats = numbers.to(dtype).to(device), numbers.to(dtype).double()
        else:
            raw = small_rows(type_name, count * rows, width, seed=index)
            weight = Grouped(type_name, count * rows, width, device)
            load_stored(weight, 0, raw)
            floats = STORED[type_name].dequantised(raw).double()
        found[name] = Stacked(weight, None if bias is None else bias.to(device), rows)
        offset = torch.zeros(count * rows) if bias is None else bias
        exact.append((floats.view(count, rows, width), offset.double().view(count, rows)))
    return StackedExperts(count, **found, gating=gating), exact


def expected_of(
    exact: list[tuple[Tensor, Tensor]],
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gating: Gating = "silu",
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    (gates, gate_bias), (ups, up_bias), (downs, down_bias) = exact
    for row in range(len(x)):
        for slot, e in enumerate(ids[row].tolist()):
            if e < 0:
                continue
            one = x[row].double()
            gate, up = gates[e] @ one + gate_bias[e], ups[e] @ one + up_bias[e]
            if isinstance(gating, ClampedGate):
                gate = gate.clamp(max=gating.limit)
                gated = (up.clamp(-gating.limit, gating.limit) + 1) * gate
                gated *= torch.sigmoid(gating.alpha * gate)
            else:
                gated = ACTIVATIONS[gating](gate) * up
            out[row] += weights[row, slot].double() * (downs[e] @ gated + down_bias[e])
    return out


def check(
    experts: StackedExperts,
    exact: list[tuple[Tensor, Tensor]],
    n: int,
    k: int,
    dtype: torch.dtype,
    *,
    misses: bool = False,
) -> None:
    """Compare with float64; with `misses`, some ids are -1, and the sum is added to the output's content."""
    generator = torch.Generator().manual_seed(n)
    weight = experts.gate.weight
    hidden = weight.shape[1] if isinstance(weight, Tensor) else weight.columns
    device = weight.device if isinstance(weight, Tensor) else weight.words.device
    x = torch.randn(n, hidden, generator=generator).to(dtype)
    ids = torch.rand(n, experts.count, generator=generator).argsort(1)[:, :k].int().contiguous()
    weights = torch.rand(n, k, generator=generator)
    if misses:
        ids[torch.rand(n, k, generator=generator) < 0.5] = -1
        ids[n // 2] = -1
    gate_up, gated, products = (
        torch.full((n * k, width), torch.nan, dtype=dtype, device=device)
        for width in (2 * experts.gate.rows, experts.gate.rows, hidden)
    )
    choice = Choice.empty(n, k, device)
    room = ExpertScratch(torch.empty(0, device=device), choice, gate_up, gated, products, per_token=k)
    there = torch.full((n, hidden), 1.0 if misses else torch.nan, dtype=dtype)
    out = there.clone().to(device)
    dispatch.multiply_experts(experts, x.to(device), ids.to(device), weights.to(device), room, out, misses)
    expected, allowed = expected_of(exact, x, ids, weights, experts.gating), DTYPES[dtype]
    if misses:
        expected += there.double()
    if not isinstance(weight, Tensor) and fallbacks.level("quantised") == "integers":  # rounds inputs
        assert (out.cpu().double() - expected).norm() <= 0.02 * expected.norm()
        return
    torch.testing.assert_close(out.cpu().double(), expected, rtol=allowed, atol=allowed * k)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 3), (9, 4)])
def test_experts_of_floats(n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    check(*made(5, None, dtype, device), n, k, dtype)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limit", [0.5, 7.0])
@pytest.mark.parametrize(("type_name", "n"), [(None, 1), (None, 9), ("Q8_0", 5)])
def test_gates_that_are_clamped(
    type_name: str | None, n: int, limit: float, dtype: torch.dtype, device: torch.device
) -> None:
    """Gates as in gpt-oss: the limit 0.5 clamps most numbers, the limit 7.0 hardly any."""
    experts, exact = made(5, type_name, dtype, device, gating=ClampedGate(limit=limit))
    check(experts, exact, n, 3, dtype)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gating", ["gelu", "relu"])
def test_other_gates(gating: Gating, dtype: torch.dtype, device: torch.device) -> None:
    """Gates as in Gemma 4 and Nemotron-H."""
    check(*made(5, None, dtype, device, gating=gating), 9, 3, dtype)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("type_name", "dtype"),
    [("Q8_0", torch.float32), ("MXFP4", torch.float16), ("Q4_0", torch.bfloat16), ("Q4_K", torch.float16)],
)
@pytest.mark.parametrize(("n", "k"), [(1, 2), (2, 2), (5, 2)])
@pytest.mark.parametrize(("products", "has_cores"), [("integers", True), ("exact", True), ("exact", False)])
def test_experts_that_stay_quantised(
    products: str,
    type_name: str,
    n: int,
    k: int,
    has_cores: bool,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    levels: Levels,
) -> None:
    if fallbacks.level("quantised") != "torch":
        levels(quantised=products)
    monkeypatch.setattr(in_triton, "has_tensor_cores", lambda device: has_cores)
    check(*made(4, type_name, dtype, device, has_bias=n == 2), n, k, dtype)


@pytest.mark.parametrize("type_name", [None, pytest.param("Q4_1", marks=pytest.mark.sample(0))])
def test_many_rows_are_put_into_blocks_by_sorting(
    type_name: str | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_triton, "FEW_PAIRS", 8)
    monkeypatch.setattr(in_triton, "LARGE_BLOCK", 32)
    monkeypatch.setattr(in_triton, "has_tensor_cores", lambda device: True)
    check(*made(3, type_name, torch.float16, device), 6, 2, torch.float16)


@pytest.mark.sample(2)
@pytest.mark.parametrize("few", [8, 1024])
@pytest.mark.parametrize("type_name", [None, "Q4_1"])
@pytest.mark.parametrize(("n", "k"), [(1, 2), (2, 1), (25, 2)])
def test_what_is_given_to_no_expert_becomes_nothing(
    type_name: str | None, n: int, k: int, few: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other devices compute some of the experts."""
    monkeypatch.setattr(in_triton, "FEW_PAIRS", few)
    check(*made(6, type_name, torch.float32, device), n, k, torch.float32, misses=True)


@pytest.mark.sample(4)
@pytest.mark.parametrize("few", [8, 1024])
@pytest.mark.parametrize(("pairs", "experts", "count"), [(1, 4, 4), (30, 3, 4), (64, 64, 16), (200, 5, 16)])
def test_each_pair_is_in_one_block_of_its_expert(
    pairs: int, experts: int, count: int, few: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_triton, "FEW_PAIRS", few)
    ids = torch.randint(experts, (pairs, 1), generator=torch.Generator().manual_seed(pairs)).int()
    blocks = in_triton.in_blocks(ids.to(device), pairs, experts, count).cpu()
    found = blocks[blocks >= 0]
    assert found.sort().values.tolist() == list(range(pairs))
    used = 0
    for block in blocks:
        members = block[block >= 0]
        assert (block[: len(members)] >= 0).all()
        assert len(ids.flatten()[members.long()].unique()) <= 1
        used += bool(len(members))
    full = sum(-(-int((ids == expert).sum()) // count) for expert in range(experts))
    assert used == full


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalises", [True, False])
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (6, 6), (8, 2), (128, 8), (60, 4)])
def test_the_best_experts_are_chosen(
    experts: int, k: int, normalises: bool, dtype: torch.dtype, device: torch.device
) -> None:
    logits = (4 * torch.randn(7, experts, generator=torch.Generator().manual_seed(k))).to(dtype)
    ids = torch.full((7, k), -1, dtype=torch.int32, device=device)
    weights = torch.full((7, k), torch.nan, device=device)
    dispatch.choose_experts(logits.to(device), normalises, ids, weights)
    shares = logits.double().softmax(-1)
    best = shares.sort(descending=True).values[:, :k]
    chosen = shares.gather(1, ids.cpu().long())
    torch.testing.assert_close(chosen, best)
    assert all(len(set(row)) == k for row in ids.tolist())
    expected = chosen / chosen.sum(1, keepdim=True) if normalises else chosen
    torch.testing.assert_close(weights.cpu().double(), expected, rtol=1e-5, atol=1e-7)


def test_what_is_not_a_number_chooses_experts_that_there_are(device: torch.device) -> None:
    logits = torch.randn(3, 6)
    logits[0, 2], logits[1], logits[2, 1] = torch.nan, torch.nan, torch.inf
    ids, weights = torch.full((3, 4), -1, dtype=torch.int32, device=device), torch.zeros(3, 4, device=device)
    dispatch.choose_experts(logits.to(device), True, ids, weights)
    assert ids.min() >= 0
    assert ids.max() < 6
