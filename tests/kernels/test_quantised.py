"""Matmuls with 4- and 8-bit weights on a GPU: with exactly the file's numbers, in float32 sums."""

from collections.abc import Iterator

import pytest
import torch
from fallback_levels import Levels, kernels_on
from gguf_files import STORED, stored_rows
from torch import Tensor

from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.kernels.in_triton import quantised as in_triton
from neo_desktop.models.linear import grouped
from neo_desktop.models.linear.grouped import CODINGS, packed_bytes
from neo_desktop.models.linear.quantised import PartShape
from neo_desktop.models.linear.quantised_gpu import QuantisedOnGPU

pytestmark = pytest.mark.usefixtures("kernel_level")


@pytest.fixture(scope="module", params=["integers", "exact", "torch"])
def kernel_level(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels_on(request.param):
        yield request.param


DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CASES = [  # all types, and some in all dtypes
    (name, dtype)
    for name in CODINGS
    for dtype in DTYPES
    if dtype is torch.float16 or name in ("Q8_0", "Q4_1", "Q4_K")
]


def loaded(
    parts: list[tuple[PartShape, Tensor]], bias: Tensor | None, dtype: torch.dtype, device: torch.device
) -> QuantisedOnGPU:
    part, raw = parts[0]
    columns = STORED[part.type_name].dequantised(raw[:1]).shape[1]
    linear = QuantisedOnGPU([part for part, _ in parts], columns, bias, dtype, device, dispatch)
    first = 0
    for part, raw in parts:
        for row in range(0, part.rows, 48):
            linear.load_stored(first + row, raw[row : row + 48])
        first += part.rows
    return linear


def check(
    linear: QuantisedOnGPU, weight: Tensor, count: int, dtype: torch.dtype, *, is_rounded: bool
) -> None:
    """Compare with float64; many rows, and torch, use weights rounded to the model's dtype."""
    (device,) = linear.memory()
    x = (torch.randn(count, weight.shape[1]) / 16).to(dtype)
    x[-1, :32] = 0.0
    bias = None if linear.bias is None else linear.bias.cpu()
    out = torch.full((count + 1, len(weight) + 3), torch.nan, dtype=dtype, device=device)
    product = linear.multiply(x.to(device), out[:count, : len(weight)])
    assert product.data_ptr() == out.data_ptr()
    assert out[count:].isnan().all()
    assert out[:, len(weight) :].isnan().all()
    if count <= in_triton.sliced_rows(device) and fallbacks.level("quantised") == "integers":
        x = grouped.rounded(x)
    exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    magnitude = x.double().abs() @ weight.double().abs().T + (0.0 if bias is None else bias.double().abs())
    eps = (x.shape[1] + 16) * torch.finfo(torch.float32).eps + is_rounded * torch.finfo(dtype).eps
    bound = eps * magnitude + 2 * torch.finfo(dtype).eps * exact.abs()
    assert ((product.cpu().double() - exact).abs() <= bound).all()


@pytest.mark.sample(8)
@pytest.mark.parametrize(("type_name", "dtype"), CASES)
@pytest.mark.parametrize("count", [1, 2, 5, 17])
def test_products_are_exact_but_for_sums(
    type_name: str, count: int, dtype: torch.dtype, device: torch.device, kernel_level: str
) -> None:
    torch.manual_seed(count)
    rows, blocks = (70, 17) if count % 2 else (33, 3)
    if "_K" in type_name:
        blocks = 3 if count % 2 else 1
    raw = stored_rows(type_name, rows, blocks * STORED[type_name].elements)
    bias = torch.randn(rows).to(dtype).to(device) if count in (2, 5, 17) else None
    linear = loaded([(PartShape(type_name, rows), raw)], bias, dtype, device)
    weight = STORED[type_name].dequantised(raw)
    check(linear, weight, count, dtype, is_rounded=count > 16 or kernel_level == "torch")


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_may_have_different_types_and_many_rows(
    dtype: torch.dtype, device: torch.device, kernel_level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped, "PIECE_BYTES", 64 * 96 * dtype.itemsize)  # a tile at once
    shapes = [PartShape("Q4_0", 30), PartShape("Q4_0", 50), PartShape("Q8_0", 17), PartShape("Q4_1", 70)]
    parts = [(shape, stored_rows(shape.type_name, shape.rows, 96, seed)) for seed, shape in enumerate(shapes)]
    weight = torch.cat([STORED[shape.type_name].dequantised(raw) for shape, raw in parts])
    bias = torch.randn(len(weight)).to(dtype).to(device)
    linear = loaded(parts, bias, dtype, device)
    assert len(linear.parts) == 3
    assert linear.form == "Q4_0+Q4_1+Q8_0"
    assert ((linear.dense().cpu().float() - weight).abs() <= torch.finfo(dtype).eps * weight.abs()).all()
    for count in (3, 20, in_triton.SLICED_ROWS + 1):
        check(linear, weight, count, dtype, is_rounded=count > 16 or kernel_level == "torch")
    packed = packed_bytes("Q4_0", 80, 96) + packed_bytes("Q8_0", 17, 96) + packed_bytes("Q4_1", 70, 96)
    assert linear.memory() == {device: packed + bias.nbytes}


@pytest.mark.sample(8)
@pytest.mark.parametrize(("type_name", "dtype"), CASES)
def test_rows_are_looked_up(type_name: str, dtype: torch.dtype, device: torch.device) -> None:
    raw = stored_rows(type_name, 150, 512)
    linear = loaded([(PartShape(type_name, 150), raw)], None, dtype, device)
    rows = torch.tensor([149, 0, 63, 64, 64, 127, 128] * 3, device=device)
    found = torch.full((len(rows), 512), torch.nan, dtype=dtype, device=device)
    linear.look_up(rows, found)
    expected = STORED[type_name].dequantised(raw)[rows.cpu()]
    eps = torch.finfo(dtype).eps if dtype is not torch.float32 else 0.0
    # The interpreter truncates bf16, a GPU rounds.
    assert ((found.cpu().float() - expected).abs() <= eps * expected.abs()).all()


@pytest.mark.sample(2)
@pytest.mark.parametrize("level", ["integers", "exact"])
def test_all_that_is_needed_is_launched_before_the_first_iteration(
    level: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, levels: Levels
) -> None:
    levels(quantised=level)
    monkeypatch.setattr(in_triton, "has_tensor_cores", lambda device: True)
    shapes = [PartShape("Q4_0", 16), PartShape("Q6_K", 16)]
    parts = [(shape, stored_rows(shape.type_name, 16, 256)) for shape in shapes]
    linear = loaded(parts, torch.zeros(32, dtype=torch.float16, device=device), torch.float16, device)
    launched = set[tuple[str, object, object]]()

    class Launcher:
        def __init__(self, kernel: object) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: object) -> object:
            return lambda *_, **constants: launched.add(
                (
                    str(self.kernel),
                    constants.get("COUNT", constants.get("IS_FIRST")),
                    constants["CODING"].group,
                )
            )

    for name in (
        "_multiply_integers",
        "_multiply_matrices",
        "_multiply_plain",
        "_multiply_tiles",
        "_dequantise",
    ):
        monkeypatch.setattr(in_triton, name, Launcher(name))
    linear.launch_all()
    by_count: set[tuple[str, object]] = {
        ("_multiply_matrices" if count > in_triton.FEW else "_multiply_integers", count)
        for count in in_triton.COUNTS
    }
    if level == "exact":
        by_count = {("_multiply_plain", 1), ("_multiply_plain", 4), ("_multiply_tiles", 16)}
    expected = by_count | {("_dequantise", False), ("_dequantise", True)}
    assert launched == {(*each, group) for each in expected for group in (16, 32)}
