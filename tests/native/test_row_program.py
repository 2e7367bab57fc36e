"""Row programs: each step against float64, reuse of memory between steps, and refusals."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from gguf_files import small_rows
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from neo_desktop import native
from neo_desktop.models.linear.quantised import PartShape, Quantised
from neo_desktop.models.linear.tiles import Tiles
from neo_desktop.native import Buffer, Columns, RowProgram, Step

DTYPES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
ISAS = native.available_isas()


def run(program: RowProgram, tensors: list[Tensor], isa: str | None = None, threads: int = 2) -> None:
    program.run([native.view_of("rows", tensor) for tensor in tensors], threads, isa=isa)


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def close(found: Tensor, exact: Tensor, scale: float) -> None:
    """Allow rounding of the result, and of sums as long as in these tests."""
    bound = DTYPES[found.dtype] * (exact.abs() + scale)
    assert ((found.double() - exact).abs() <= bound).all()


ONE_BY_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "copy": lambda x: x,
    "add_number": lambda x: x + 0.75,
    "times_number": lambda x: x * 0.75,
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ONE_BY_ONE)
def test_numbers_one_by_one(op: str, dtype: torch.dtype, isa: str) -> None:
    """Groups are not adjacent, and their length is no multiple of the vector lanes."""
    length, groups, rows = 21, 3, 4
    x, out = numbers(rows, 80, dtype=dtype), torch.zeros(rows, 90, dtype=dtype)
    step = Step(op, (Columns(0, 2, 25),), Columns(1, 5, 28), length, groups=groups, number=0.75)
    run(RowProgram([Buffer(80, dtype, True), Buffer(90, dtype, True)], [step]), [x, out], isa)
    expected = torch.zeros(rows, 90, dtype=torch.float64)
    for group in range(groups):
        of_group = x[:, 2 + 25 * group :][:, :length].double()
        expected[:, 5 + 28 * group :][:, :length] = ONE_BY_ONE[op](of_group)
    close(out, expected, 1.0 if op.startswith("gelu") or op in ("sigmoid", "softplus") else 1e-6)


BY_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "subtract": torch.subtract,
    "times": torch.multiply,
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", BY_TWO)
def test_numbers_by_two(op: str, dtype: torch.dtype, isa: str) -> None:
    rows, width = 3, 37
    a, b = numbers(rows, width, dtype=dtype), numbers(rows, width, dtype=dtype, seed=1)
    outs = [torch.zeros(rows, width, dtype=dtype) for _ in range(2)]
    steps = [
        Step(op, (Columns(0), Columns(1)), Columns(2), width),
        Step(op, (Columns(0),), Columns(3), width, weights=(b[1].clone(),)),
    ]
    run(RowProgram([Buffer(width, dtype, True)] * 4, steps), [a, b, *outs], isa)
    close(outs[0], BY_TWO[op](a.double(), b.double()), 1e-6)
    close(outs[1], BY_TWO[op](a.double(), b[1].double()), 1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype, isa: str) -> None:
    """Rows have three groups, and a mean far from zero."""
    rows, length, groups, eps = 3, 45, 3, 1e-5
    width = length * groups
    x = numbers(rows, width, dtype=dtype) + 3
    weight, bias = numbers(length, dtype=dtype, seed=1), numbers(length, dtype=dtype, seed=2)
    outs = [torch.zeros(rows, width, dtype=dtype) for _ in range(4)]
    of_groups = {"length": length, "groups": groups, "number": eps}
    steps = [
        Step(op, (Columns(0, 0, length),), Columns(at, 0, length), weights=weights, **of_groups)
        for at, op, weights in (
            (1, "rms_norm", (weight,)),
            (2, "rms_norm", (weight.float(),)),
            (3, "layer_norm", (weight, bias)),
            (4, "layer_norm", (weight,)),
        )
    ]
    run(RowProgram([Buffer(width, dtype, True)] * 5, steps), [x, *outs], isa)
    exact = x.double().view(rows, groups, length)
    normed = exact / torch.sqrt(exact.square().mean(-1, keepdim=True) + eps) * weight.double()
    for out in outs[:2]:
        close(out, normed.flatten(1), DTYPES[torch.float32] * 50 if dtype is torch.float32 else 0.1)
    for out, added in ((outs[2], bias), (outs[3], None)):
        of = F.layer_norm(exact, (length,), weight.double(), None if added is None else added.double(), eps)
        close(out, of.flatten(1), 2.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_conversions(dtype: torch.dtype) -> None:
    x, out = numbers(3, 19, dtype=dtype), torch.zeros(3, 19, dtype=dtype)
    steps = [Step("copy", (Columns(0),), Columns(1), 19), Step("copy", (Columns(1),), Columns(2), 19)]
    buffers = [Buffer(19, dtype, True), Buffer(19, torch.float32), Buffer(19, dtype, True)]
    run(RowProgram(buffers, steps), [x, out])
    assert torch.equal(x, out)


def test_norms_that_are_summed_up_change_the_residual() -> None:
    residual, x = numbers(2, 16, dtype=torch.float32), numbers(2, 16, dtype=torch.float32, seed=1)
    out, weight = torch.zeros(2, 16), torch.ones(16)
    total = residual + x
    step = Step("add_rms_norm", (Columns(0), Columns(1)), Columns(2), 16, number=1e-6, weights=(weight,))
    run(RowProgram([Buffer(16, torch.float32, True)] * 3, [step]), [residual, x, out])
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(out, torch.rms_norm(total, (16,), eps=1e-6))


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12),
    st.sampled_from([1, 2, 7, 700]),
    st.integers(1, 3),
)
def test_memory_that_others_have_left_is_not_read(
    sums: list[tuple[int, int]], rows: int, threads: int
) -> None:
    """Every step adds two earlier values; a matmul in between allows reuse of memory."""
    width, dtype = 16, torch.float32
    tiles = torch.zeros(width, 16)  # [columns, rows]: an identity, packed as float32
    tiles.fill_diagonal_(1.0)
    kind = len(native.STORED_TYPES)
    matrix = ([(kind, tiles.data_ptr(), tiles.nbytes, width)], None)
    x = torch.arange(rows * width, dtype=dtype).view(rows, width) % 97
    out = torch.zeros(rows, width)
    buffers, steps, values = [Buffer(width, dtype, True)] * 2, [], [(0, x.clone())]
    for one, other in sums:
        (a, of_a), (b, of_b) = values[one % len(values)], values[other % len(values)]
        into = len(buffers)
        buffers += [Buffer(width, dtype), Buffer(width, dtype)]
        steps += [
            Step("add", (Columns(a), Columns(b)), Columns(into), width),
            Step("multiply", (Columns(into),), Columns(into + 1), width, groups=width, matrix=matrix),
        ]
        values.append((into + 1, of_a + of_b))
    last, expected = values[-1]
    steps.append(Step("copy", (Columns(last),), Columns(1), width))
    run(RowProgram(buffers, steps), [x, out], threads=threads)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K", None])
@pytest.mark.parametrize("rows", [1, 40, 700])
def test_heads_are_multiplied_by_their_own_matrices(rows: int, type_name: str | None) -> None:
    """There are gaps between heads; each has the bits of its single product."""
    heads, columns, width, dtype = 3, 256, 32, torch.float32
    weights = numbers(heads * width, columns, dtype=dtype)
    if type_name is None:
        linear: Tiles | Quantised = Tiles(heads * width, columns, None, dtype)
        linear.load(0, weights)
    else:
        linear = Quantised([PartShape(type_name, heads * width)], columns, None, dtype)
        linear.load_stored(0, small_rows(type_name, heads * width, columns))
    x, out = numbers(rows, 900, dtype=dtype, seed=1), torch.full((rows, 130), 7.0)
    source, into = Columns(0, 4, columns + 20), Columns(1, 2, width + 5)
    step = Step("multiply", (source,), into, width, groups=columns, matrix=linear.native)
    run(RowProgram([Buffer(900, dtype, True), Buffer(130, dtype, True)], [step]), [x, out])
    expected = torch.full((rows, 130), 7.0)
    for head in range(heads):
        kind, address, nbytes, _ = linear.packed_parts[0].native_from(head * width)
        part = kind, address, nbytes // (heads - head), width
        of_head = x[:, 4 + head * (columns + 20) :][:, :columns]
        native.packed_linear(of_head, [part], None, expected[:, 2 + head * (width + 5) :][:, :width])
    assert torch.equal(out, expected)
    bad = replace(step, into=Columns(1, 2, width - 1))
    with pytest.raises(ValueError, match="heads overlap"):
        RowProgram([Buffer(900, dtype, True), Buffer(130, dtype, True)], [bad])


X, OUT = Buffer(16, torch.float32, True), Buffer(16, torch.float32, True)
WRONG: dict[str, tuple[list[Buffer], Step, str]] = {
    "a buffer that is not there": ([X, OUT], Step("silu", (Columns(2),), Columns(1), 16), "no buffer"),
    "columns beyond the end": ([X, OUT], Step("silu", (Columns(0, 1),), Columns(1), 16), "outside"),
    "groups beyond the end": (
        [X, OUT],
        Step("silu", (Columns(0, 0, 6),), Columns(1, 0, 4), 4, groups=4),
        "outside",
    ),
    "a source too few": ([X, OUT], Step("add", (Columns(0),), Columns(1), 16), "sources"),
    "two dtypes": (
        [X, Buffer(16, torch.bfloat16, True)],
        Step("silu", (Columns(0),), Columns(1), 16),
        "another dtype",
    ),
    "no weights": ([X, OUT], Step("rms_norm", (Columns(0),), Columns(1), 16), "no weights"),
    "weights of another length": (
        [X, OUT],
        Step("rms_norm", (Columns(0),), Columns(1), 16, weights=(torch.ones(8),)),
        "weights",
    ),
    "no matrix": ([X, OUT], Step("multiply", (Columns(0),), Columns(1), 16, groups=16), "matrix"),
    "a buffer of whole numbers": (
        [Buffer(16, torch.int32, True), OUT],
        Step("silu", (Columns(0),), Columns(1), 16),
        "fp32",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_together_is_refused(name: str) -> None:
    buffers, step, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        RowProgram(buffers, [step])
