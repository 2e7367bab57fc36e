"""PTX instructions that compute equal Python's exact integers and fractions, and torch's roundings."""

import math
import operator
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from ptx.numbers import Array
from ptx.run import UnsupportedError
from ptx.snippets import computed, execute

pytestmark = pytest.mark.sample(0)  # as for the tests of `test_ptx.py`, which execute PTX
RANDOM = np.random.default_rng(0)
COUNT = 96
EDGES = [0, 1, -1, 2, 31, 32, 33, 255, 2**15, 2**31 - 1, -(2**31), -(2**15)]


def integers(dtype: str) -> Array:
    """Return random bits, and numbers at which code often breaks."""
    random = RANDOM.integers(0, 2**64, COUNT, np.uint64)
    random[: len(EDGES)] = np.array(EDGES, np.int64).view(np.uint64)
    RANDOM.shuffle(random)
    return random.astype(f"u{np.dtype(dtype).itemsize}").view(dtype)


def floats(dtype: type[np.floating] = np.float32) -> Array:
    random = (RANDOM.standard_normal(COUNT) * 10.0 ** RANDOM.integers(-4, 4, COUNT)).astype(dtype)
    random[:8] = [0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, -1.0, 1e-7]
    RANDOM.shuffle(random)
    return random


def truncated(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def byte_at(x: int, place: int) -> int:
    return x >> 8 * place & 255


def field(x: int, first: int, length: int) -> int:
    return (x >> (first & 255)) & (2 ** (length & 255) - 1)


def permuted(x: int, y: int, selectors: int) -> int:
    found = 0
    for place in range(4):
        selector = selectors >> 4 * place & 15
        byte = byte_at(x | y << 32, selector & 7)
        found |= (255 * (byte >> 7) if selector & 8 else byte) << 8 * place
    return found


def dot(x: int, y: int, total: int, signed: bool) -> int:
    def number(byte: int, is_signed: bool) -> int:
        return byte - 256 if is_signed and byte > 127 else byte

    return total + sum(number(byte_at(x, i), signed) * number(byte_at(y, i), True) for i in range(4))


# instruction, dtypes of operands and result, exact function of Python's integers; its lowest bits count.
INTEGERS: list[tuple[str, list[str], str, Callable[..., int]]] = [
    ("add.s32 {d}, {0}, {1}", ["i4", "i4"], "i4", lambda x, y: x + y),
    ("add.s64 {d}, {0}, {1}", ["i8", "i8"], "i8", lambda x, y: x + y),
    ("sub.s32 {d}, {0}, {1}", ["i4", "i4"], "i4", lambda x, y: x - y),
    ("mul.lo.s32 {d}, {0}, {1}", ["i4", "i4"], "i4", lambda x, y: x * y),
    ("mul.hi.u32 {d}, {0}, {1}", ["u4", "u4"], "u4", lambda x, y: x * y >> 32),
    ("mul.hi.s32 {d}, {0}, {1}", ["i4", "i4"], "i4", lambda x, y: x * y >> 32),
    ("mul.hi.u16 {d}, {0}, {1}", ["u2", "u2"], "u2", lambda x, y: x * y >> 16),
    ("mul.wide.s32 {d}, {0}, {1}", ["i4", "i4"], "i8", lambda x, y: x * y),
    ("mul.wide.u32 {d}, {0}, {1}", ["u4", "u4"], "u8", lambda x, y: x * y),
    ("mad.lo.s32 {d}, {0}, {1}, {2}", ["i4", "i4", "i4"], "i4", lambda x, y, z: x * y + z),
    ("mad.wide.s32 {d}, {0}, {1}, {2}", ["i4", "i4", "i8"], "i8", lambda x, y, z: x * y + z),
    ("div.s32 {d}, {0}, {1}", ["i4", "i4"], "i4", lambda x, y: truncated(x, y or 1)),
    ("div.u32 {d}, {0}, {1}", ["u4", "u4"], "u4", lambda x, y: x // (y or 1)),
    ("rem.s32 {d}, {0}, {1}", ["i4", "i4"], "i4", lambda x, y: x - truncated(x, y or 1) * (y or 1)),
    ("min.s32 {d}, {0}, {1}", ["i4", "i4"], "i4", min),
    ("max.u32 {d}, {0}, {1}", ["u4", "u4"], "u4", max),
    ("neg.s32 {d}, {0}", ["i4"], "i4", lambda x: -x),
    ("abs.s32 {d}, {0}", ["i4"], "i4", abs),
    ("and.b32 {d}, {0}, {1}", ["u4", "u4"], "u4", lambda x, y: x & y),
    ("or.b64 {d}, {0}, {1}", ["u8", "u8"], "u8", lambda x, y: x | y),
    ("xor.b32 {d}, {0}, {1}", ["u4", "u4"], "u4", lambda x, y: x ^ y),
    ("not.b32 {d}, {0}", ["u4"], "u4", lambda x: ~x),
    ("shl.b32 {d}, {0}, {1}", ["u4", "u4"], "u4", lambda x, by: x << min(by, 64)),
    ("shl.b64 {d}, {0}, {1}", ["u8", "u4"], "u8", lambda x, by: x << min(by, 64)),
    ("shr.s32 {d}, {0}, {1}", ["i4", "u4"], "i4", lambda x, by: x >> min(by, 64)),
    ("shr.u32 {d}, {0}, {1}", ["u4", "u4"], "u4", lambda x, by: x >> min(by, 64)),
    ("shr.u64 {d}, {0}, {1}", ["u8", "u4"], "u8", lambda x, by: x >> min(by, 64)),
    ("bfe.u32 {d}, {0}, {1}, {2}", ["u4", "u4", "u4"], "u4", field),
    ("bfe.s32 {d}, {0}, 3, 1", ["i4"], "i4", lambda x: -(x >> 3 & 1)),
    ("prmt.b32 {d}, {0}, {1}, {2}", ["u4", "u4", "u4"], "u4", permuted),
    ("lop3.b32 {d}, {0}, {1}, {2}, 0xE8", ["u4"] * 3, "u4", lambda x, y, z: x & y | x & z | y & z),
    ("lop3.b32 {d}, {0}, {1}, {2}, 0x96", ["u4"] * 3, "u4", lambda x, y, z: x ^ y ^ z),
    ("shf.l.wrap.b32 {d}, {0}, {1}, {2}", ["u4"] * 3, "u4", lambda x, y, by: (y << 32 | x) << by % 32 >> 32),
    ("shf.r.wrap.b32 {d}, {0}, {1}, {2}", ["u4"] * 3, "u4", lambda x, y, by: (y << 32 | x) >> by % 32),
    ("dp4a.u32.s32 {d}, {0}, {1}, {2}", ["u4", "u4", "i4"], "i4", lambda x, y, z: dot(x, y, z, False)),
    ("dp4a.s32.s32 {d}, {0}, {1}, {2}", ["u4", "u4", "i4"], "i4", lambda x, y, z: dot(x, y, z, True)),
    ("cvt.s64.s32 {d}, {0}", ["i4"], "i8", int),
    ("cvt.u64.u32 {d}, {0}", ["u4"], "u8", int),
    ("cvt.u32.u64 {d}, {0}", ["u8"], "u4", int),
    ("cvt.s8.s32 {d}, {0}", ["i4"], "i2", lambda x: (x & 255) - 256 * (x >> 7 & 1)),
    ("cvt.u32.u16 {d}, {0}", ["u2"], "u4", int),
]


@pytest.mark.parametrize(("instruction", "kinds", "result", "exact"), INTEGERS, ids=[i[0] for i in INTEGERS])
def test_integers(instruction: str, kinds: list[str], result: str, exact: Callable[..., int]) -> None:
    operands = [integers(kind) for kind in kinds]
    found = computed(instruction, *operands, result=result)
    unsigned = f"u{found.itemsize}"
    wanted = [
        exact(*(int(x) for x in row)) % 2 ** (8 * found.itemsize) for row in zip(*operands, strict=True)
    ]
    assert found.view(unsigned).tolist() == wanted


def rounded(exact: Fraction, dtype: torch.dtype) -> float:
    """Return the nearest number of a dtype, by comparing neighbours; of two the even one."""
    near = torch.tensor(float(exact), dtype=torch.float64).to(dtype)
    bits = near.view(torch.int16 if near.itemsize == 2 else torch.int32)
    if exact == 0:
        return 0.0
    around = [bits + step for step in (-1, 0, 1)]
    best = min(around, key=lambda each: (abs(Fraction(each.view(dtype).item()) - exact), each.item() & 1))
    return float(best.view(dtype).item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_floats_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    exact: dict[str, Callable[..., Fraction]] = {
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
        "mul": lambda x, y: x * y,
        "fma": lambda x, y, z: x * y + z,
    }
    operands = torch.randn(2 + (name == "fma"), COUNT).to(dtype)
    kind = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    integer = torch.int32 if dtype is torch.float32 else torch.int16
    raw = [each.view(integer).numpy() for each in operands]
    places = ", ".join(f"{{{place}}}" for place in range(len(raw)))
    found = computed(f"{name}.rn.{kind} {{d}}, {places}", *raw, result=f"i{dtype.itemsize}")
    wanted = [rounded(exact[name](*map(Fraction, row)), dtype) for row in operands.T.tolist()]
    assert torch.from_numpy(found).view(dtype).tolist() == wanted


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_small_floats_are_added_to_float32(kind: str) -> None:
    dtype = torch.float16 if kind == "f16" else torch.bfloat16
    x, y = torch.randn(2, COUNT).to(dtype)
    z = torch.randn(COUNT)
    raw = [x.view(torch.int16).numpy(), y.view(torch.int16).numpy(), z.numpy()]
    assert (
        computed(f"add.rn.f32.{kind} {{d}}, {{0}}, {{1}}", raw[0], raw[2], result="f4") == (x + z).numpy()
    ).all()
    assert (
        computed(f"sub.rn.f32.{kind} {{d}}, {{0}}, {{1}}", raw[0], raw[2], result="f4") == (x - z).numpy()
    ).all()
    found = computed(f"fma.rn.f32.{kind} {{d}}, {{0}}, {{1}}, {{2}}", *raw, result="f4")
    assert (found == (x.double() * y.double() + z.double()).float().numpy()).all()


FUNCTIONS: list[tuple[str, Callable[..., torch.Tensor]]] = [
    ("div.full.f32", lambda x, y: x / y),
    ("max.f32", torch.fmax),
    ("min.f32", torch.fmin),
    ("max.NaN.f32", torch.maximum),
    ("min.NaN.f32", torch.minimum),
    ("ex2.approx.f32", torch.exp2),
    ("lg2.approx.f32", torch.log2),
    ("sqrt.rn.f32", torch.sqrt),
    ("rsqrt.approx.f32", torch.rsqrt),
    ("rcp.rn.f32", torch.reciprocal),
    ("tanh.approx.f32", torch.tanh),
    ("neg.f32", torch.neg),
    ("abs.f32", torch.abs),
]


@pytest.mark.parametrize(("name", "exact"), FUNCTIONS, ids=[name for name, _ in FUNCTIONS])
def test_functions_of_floats(name: str, exact: Callable[..., torch.Tensor]) -> None:
    """On a GPU, `.approx` is less exact."""
    operands = [floats() for _ in range(1 + (name[:3] in ("div", "max", "min")))]
    places = ", ".join(f"{{{place}}}" for place in range(len(operands)))
    found = computed(f"{name} {{d}}, {places}", *operands, result="f4")
    wanted = exact(*(torch.from_numpy(each).double() for each in operands)).float()
    torch.testing.assert_close(torch.from_numpy(found), wanted, equal_nan=True)


def test_numbers_below_the_normal_ones_are_flushed_on_request() -> None:
    tiny = np.full(COUNT, 1e-39, np.float32)
    assert (computed("mul.f32 {d}, {0}, 0f3F800000", tiny, result="f4") == tiny).all()
    assert (computed("mul.ftz.f32 {d}, {0}, 0f3F800000", tiny, result="f4") == 0).all()


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2", "f32x2"])
def test_packed_numbers_are_computed_one_by_one(kind: str) -> None:
    numbers = [np.stack([floats(), floats()], 1) for _ in range(3)]
    dtype = {"f16x2": torch.float16, "bf16x2": torch.bfloat16, "f32x2": torch.float32}[kind]
    x, y, z = (torch.from_numpy(each).to(dtype) for each in numbers)
    raw = f"u{2 * dtype.itemsize}"
    views = [each.view(torch.uint8).numpy().view(raw)[:, 0] for each in (x, y, z)]
    found = computed(f"fma.rn.{kind} {{d}}, {{0}}, {{1}}, {{2}}", *views, result=raw)
    wanted = (x.double() * y.double() + z.double()).to(dtype)
    pairs = torch.from_numpy(found.view(np.uint8).copy()).view(dtype).view(-1, 2)
    torch.testing.assert_close(pairs, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "how", ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu"]
)
def test_comparisons_of_floats(how: str) -> None:
    x, y = floats(), floats()
    y[::3] = x[::3]
    compare = getattr(operator, how[:2])
    wanted = [
        how.endswith("u") if math.isnan(a) or math.isnan(b) else compare(a, b)
        for a, b in zip(x.tolist(), y.tolist(), strict=True)
    ]
    assert computed(f"setp.{how}.f32 {{d}}, {{0}}, {{1}}", x, y, result="bool").tolist() == wanted


def test_comparisons_of_integers_combine_with_predicates() -> None:
    x, y, also = integers("i4"), integers("i4"), RANDOM.random(COUNT) < 0.5
    assert (computed("setp.lt.s32 {d}, {0}, {1}", x, y, result="bool") == (x < y)).all()
    assert (computed("setp.lt.u32 {d}, {0}, {1}", x, y, result="bool") == (x.view("u4") < y.view("u4"))).all()
    found = computed("setp.gt.and.s32 {d}, {0}, {1}, {2}", x, y, also, result="bool")
    assert (found == ((x > y) & also)).all()
    assert (computed("xor.pred {d}, {0}, {1}", also, x > y, result="bool") == (also ^ (x > y))).all()
    assert (computed("selp.b32 {d}, {0}, {1}, {2}", x, y, also, result="i4") == np.where(also, x, y)).all()


def test_conversions_round_as_torch_does() -> None:
    x = floats()
    x[x > 6e4] = 7.0
    halves = torch.from_numpy(x).half()
    assert (computed("cvt.rn.f16.f32 {d}, {0}", x, result="u2") == halves.view(torch.uint16).numpy()).all()
    back = computed("cvt.f32.f16 {d}, {0}", halves.numpy(), result="f4")
    np.testing.assert_array_equal(back, halves.float().numpy())
    finite = np.nan_to_num(x)
    short = torch.from_numpy(finite).bfloat16()
    assert (
        computed("cvt.rn.bf16.f32 {d}, {0}", finite, result="u2") == short.view(torch.uint16).numpy()
    ).all()
    for kind, dtype in (("f16x2", torch.float16), ("bf16x2", torch.bfloat16)):
        pairs = computed(f"cvt.rn.{kind}.f32 {{d}}, {{0}}, {{1}}", finite, finite[::-1], result="u4")
        low = torch.from_numpy(finite[::-1].copy()).to(dtype).view(torch.uint16).numpy().astype(np.uint32)
        high = torch.from_numpy(finite).to(dtype).view(torch.uint16).numpy().astype(np.uint32)
        assert (pairs == (low | high << 16)).all()
    for how, exact in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
        some = np.clip(finite, -1e6, 1e6)
        assert (computed(f"cvt.{how}.s32.f32 {{d}}, {{0}}", some, result="i4") == exact(some)).all()
    assert computed("cvt.rzi.u32.f32 {d}, {0}", np.full(COUNT, -7.0, "f4"), result="u4").max() == 0
    numbers = integers("i4")
    assert (computed("cvt.rn.f32.s32 {d}, {0}", numbers, result="f4") == numbers.astype(np.float32)).all()


@pytest.mark.parametrize(
    "unknown", ["add.cc.s32", "mul.sat.f32", "cvt.rz.f16.f32", "atom.add.s32", "bar.arrive"]
)
def test_unknown_instructions_are_errors(unknown: str) -> None:
    with pytest.raises(UnsupportedError, match="unknown"):
        execute(f"{unknown} %r1, %r2, %r3;")
