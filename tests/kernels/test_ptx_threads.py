"""PTX instructions that move data or order threads; and what the interpreter reports."""

import numpy as np
import pytest
from ptx.memory import KernelError
from ptx.numbers import Array
from ptx.snippets import computed, execute

pytestmark = pytest.mark.sample(0)  # as for the tests of `test_ptx.py`, which execute PTX
NUMBERS = np.arange(64, dtype=np.uint32)
# %rd80: the thread's element of array 0; %r80: its place in shared memory.
OWN = "mad.wide.u32 %rd80, %r90, 4, %rd90; shl.b32 %r80, %r90, 2;"
OTHER_WARP = "xor.b32 %r81, %r80, 128;"  # the place of a thread of the other warp


def test_registers_are_composed_and_taken_apart() -> None:
    x = np.arange(64, dtype=np.uint64) * 0x0123_4567_89AB_CDEF
    low = computed("mov.b64 {{{d}, %r60}}, {0}", x, result="u4")
    high = computed("mov.b64 {{%r60, {d}}}, {0}", x, result="u4")
    assert (low | high.astype(np.uint64) << 32 == x).all()
    assert (computed("mov.b64 {d}, {{{0}, {1}}}", low, high, result="u8") == x).all()
    assert (computed("mov.b32 {{_, {d}}}, {0}", low, result="u2") == low >> 16).all()


def test_loads_are_extended_to_their_register() -> None:
    x, out = np.array([[-5, 7]] * 32, np.int32), np.zeros((32, 2), np.int64)
    body = """mad.wide.u32 %rd80, %r90, 8, %rd90; mad.wide.u32 %rd81, %r90, 16, %rd91;
        ld.global.v2.b32 {%r1, %r2}, [%rd80+0]; shl.b32 %r3, %r90, 3;
        st.shared.v2.b32 [%r3+8], {%r1, %r2}; ld.shared.s32 %rd1, [%r3+8]; ld.shared.b32 %rd2, [%r3+8];
        st.global.v2.b64 [ %rd81 + 0 ], { %rd1, %rd2 };"""
    execute(body, x, out, shared_bytes=8 * 33)
    assert (out == [-5, 2**32 - 5]).all()


def test_threads_know_their_places() -> None:
    out = np.zeros((5, 64), np.uint32)
    body = f"""{OWN} mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.x; mov.u32 %r3, %ntid.x;
        mad.lo.s32 %r4, %r1, %r3, 0; mad.wide.u32 %rd80, %r4, 4, %rd80;
        mad.lo.s32 %r5, %r2, 1000, %r4; add.s32 %r5, %r5, %r90; st.global.b32 [%rd80], %r5;"""
    execute(body, out, threads=64, grid=5)
    assert out.ravel().tolist() == [5000 + i for i in range(5 * 64)]


@pytest.mark.parametrize(
    ("how", "by", "limits", "source"),
    [
        ("bfly", 8, 31, lambda lane: lane ^ 8),
        ("idx", 5, 31, lambda lane: 5),
        ("idx", 5, 0x181F, lambda lane: lane & 24 | 5),
        ("up", 3, 0, lambda lane: lane - 3 if lane >= 3 else lane),
        ("down", 3, 31, lambda lane: lane + 3 if lane < 29 else lane),
        ("down", 3, 0x181F, lambda lane: lane + 3 if lane % 8 < 5 else lane),
    ],
)
def test_shuffles(how: str, by: int, limits: int, source: object) -> None:
    found = computed(f"shfl.sync.{how}.b32 {{d}}, {{0}}, {by}, {limits}, -1", NUMBERS, result="u4")
    assert found.tolist() == [32 * warp + source(lane) for warp in range(2) for lane in range(32)]


def test_reductions_of_a_warp() -> None:
    found = computed("redux.sync.add.s32 {d}, {0}, -1", NUMBERS, result="u4").reshape(2, 32)
    assert (found == NUMBERS.reshape(2, 32).sum(1, keepdims=True)).all()
    found = computed("redux.sync.max.u32 {d}, {0}, -1", NUMBERS, result="u4")
    assert found.tolist() == [31] * 32 + [63] * 32


def test_threads_part_and_meet_again() -> None:
    """Each thread halves its number until it is 0; a shuffle needs them together again."""
    numbers, counts = NUMBERS.copy(), NUMBERS.copy()
    body = f"""{OWN} ld.global.b32 %r1, [%rd80]; mov.b32 %r2, 0;
        setp.eq.s32 %p1, %r1, 0; @%p1 bra $L_END;
        $L_LOOP: shr.u32 %r1, %r1, 1; add.s32 %r2, %r2, 1; setp.ne.s32 %p2, %r1, 0; @%p2 bra $L_LOOP;
        $L_END: shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;
        mad.wide.u32 %rd81, %r90, 4, %rd91; st.global.b32 [%rd81], %r3;"""
    execute(body, numbers, counts, threads=64)
    assert counts.tolist() == [(n ^ 1).bit_length() for n in range(64)]


EXCHANGE = f"""{OWN} {OTHER_WARP} ld.global.b32 %r1, [%rd80]; st.shared.b32 [%r80], %r1; bar.sync 0;
    ld.shared.b32 %r2, [%r81]; bar.sync 0; add.s32 %r2, %r2, 1; st.shared.b32 [%r80], %r2; bar.sync 0;
    ld.shared.b32 %r3, [%r81]; st.global.b32 [%rd80], %r3;"""


def test_warps_exchange_numbers() -> None:
    numbers = NUMBERS.copy()
    execute(EXCHANGE, numbers, threads=64, shared_bytes=256)
    assert (numbers == NUMBERS + 1).all()


@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_missing_barrier_is_noticed(missing: int, seed: int) -> None:
    parts = EXCHANGE.split("bar.sync 0;")
    parts[missing : missing + 2] = ["".join(parts[missing : missing + 2])]
    with pytest.raises(KernelError, match=r"another warp|before it was written"):
        execute("bar.sync 0;".join(parts), NUMBERS.copy(), threads=64, shared_bytes=256, seed=seed)


def test_a_missing_barrier_shows_in_global_memory() -> None:
    """Nothing watches the exchange of warps there, but their order is random."""
    body = f"""{OWN} xor.b32 %r82, %r90, 32; mad.wide.u32 %rd81, %r82, 4, %rd90;
        mad.wide.u32 %rd82, %r90, 4, %rd91;
        add.s32 %r1, %r90, 100; st.global.b32 [%rd80], %r1; bar.sync 0;
        ld.global.b32 %r2, [%rd81]; st.global.b32 [%rd82], %r2;"""
    wanted = (NUMBERS ^ 32) + 100

    def is_right(body: str, seed: int) -> bool:
        out = np.zeros(64, np.uint32)
        execute(body, np.zeros(64, np.uint32), out, threads=64, seed=seed)
        return bool((out == wanted).all())

    assert all(is_right(body, seed) for seed in range(8))
    assert not all(is_right(body.replace("bar.sync 0;", ""), seed) for seed in range(8))


def copies(wait: str, barrier: str = "bar.sync 0;") -> str:
    """Return a body that copies two groups to shared memory, and reads the first one of the other warp."""
    return f"""{OWN} {OTHER_WARP}
        cp.async.ca.shared.global [%r80], [%rd80], 0x4; cp.async.commit_group;
        cp.async.ca.shared.global [%r80+256], [%rd80], 0x4; cp.async.commit_group;
        {wait} {barrier} ld.shared.b32 %r1, [%r81]; st.global.b32 [%rd80], %r1;"""


def test_asynchronous_copies_arrive_by_group() -> None:
    for wait in ("cp.async.wait_group 1;", "cp.async.wait_group 0;", "cp.async.wait_all;"):
        numbers = NUMBERS.copy()
        execute(copies(wait), numbers, threads=64, shared_bytes=512)
        assert (numbers == NUMBERS ^ 32).all()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (copies(""), "read before it was written"),
        (copies("cp.async.wait_group 2;"), "read before it was written"),
        (copies("cp.async.wait_group 1;", barrier=""), "."),
        (copies("cp.async.wait_group 1;").replace("[%r81]", "[%r81+256]"), "read before it was written"),
        (copies("st.shared.b32 [%r80], %r90;"), "before the asynchronous copy"),
    ],
)
def test_a_missing_wait_is_noticed(body: str, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        execute(body, NUMBERS.copy(), threads=64, shared_bytes=512)


def test_copies_of_nothing_write_zeros() -> None:
    """A thread of an odd number reads no bytes, at an address that need not exist."""
    numbers = NUMBERS[:32].copy()
    body = f"""{OWN} and.b32 %r1, %r90, 1; setp.eq.s32 %p1, %r1, 0; selp.b32 %r2, 4, 0, %p1;
        selp.b64 %rd81, %rd80, 0, %p1; cp.async.ca.shared.global [%r80], [%rd81], 0x4, %r2; cp.async.wait_all;
        ld.shared.b32 %r3, [%r80]; st.global.b32 [%rd80], %r3;"""
    execute(body, numbers, shared_bytes=128)
    assert (numbers == np.where(NUMBERS[:32] % 2, 0, NUMBERS[:32])).all()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.b32 %r1, [%rd80+-4];", "-4 of array 0, which has 128 bytes"),
        ("ld.global.b32 %r1, [%rd80+4];", "128 of array 0"),
        ("st.global.b64 [%rd90+124], %rd90;", "multiple of 8"),
        ("ld.global.b32 %r1, [%rd70];", "-0x1"),  # a register without content
        ("mov.b64 %rd70, 4096; ld.global.b32 %r1, [%rd70];", "of array 0"),
        ("ld.shared.b32 %r1, [%r80];", "before it was written"),
        ("st.shared.b32 [%r80+4], %r90;", "of 128 bytes of shared memory"),
        ("st.shared.b32 [%r80+2], %r90;", "multiple of 4"),
        ("st.shared.b32 [0], %r90;", "different values"),
        (
            "setp.lt.s32 %p1, %r90, 16; @%p1 bra $L_A; shfl.sync.bfly.b32 %r1, %r90, 1, 31, -1; $L_A:",
            "part of a warp",
        ),
        ("setp.lt.s32 %p1, %r90, 16; @%p1 bar.sync 0;", "part of a warp"),
        ("$L_A: bra $L_A;", "does not end"),
    ],
)
def test_faults_are_reported(body: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ptx.run.MOST_BLOCKS", 100)
    with pytest.raises(KernelError, match=message):
        execute(f"{OWN} {body}", NUMBERS[:32].copy(), shared_bytes=128)


def floats_in(numbers: Array) -> Array:
    return np.ascontiguousarray(numbers, np.float16).view(np.uint32)


@pytest.mark.parametrize("how", ["", ".trans"])
def test_tensor_cores_multiply_matrices(how: str) -> None:
    """`ldmatrix` reads a [16, 16] and b [16, 8], or b's transpose, stored row by row."""
    random = np.random.default_rng(0)
    a, b = random.integers(-9, 9, (16, 16)), random.integers(-9, 9, (16, 8))
    both = np.concatenate([floats_in(a).ravel(), floats_in(b if how else b.T).ravel()])
    out = np.zeros((16, 8), np.float32)
    # Lane l gives the address of row l % 16 of a's left (l < 16) or right half, and of b or half of b.T.
    b_rows = (
        "shl.b32 %r30, %r22, 4;"
        if how
        else "and.b32 %r30, %r90, 7; shl.b32 %r30, %r30, 5; shr.u32 %r31, %r22, 3;"
        "mad.lo.s32 %r30, %r31, 16, %r30;"
    )
    body = f"""{OWN}
        mov.b32 %r1, 0;
        $L_COPY: mad.lo.s32 %r2, %r1, 32, %r90; mad.wide.u32 %rd1, %r2, 4, %rd90; ld.global.b32 %r3, [%rd1];
        shl.b32 %r4, %r2, 2; st.shared.b32 [%r4], %r3; add.s32 %r1, %r1, 1; setp.lt.s32 %p1, %r1, 6;
        @%p1 bra $L_COPY;
        and.b32 %r22, %r90, 15; shr.u32 %r23, %r90, 4; shl.b32 %r24, %r22, 5; mad.lo.s32 %r24, %r23, 16, %r24;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r24];
        {b_rows}
        ldmatrix.sync.aligned.m8n8.x2{how}.shared.b16 {{%r14, %r15}}, [%r30+512];
        mov.b32 %r16, 0f00000000;
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%r17, %r18, %r19, %r20}},
        {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%r16, %r16, %r16, %r16}};
        shr.u32 %r40, %r90, 2; and.b32 %r41, %r90, 3; shl.b32 %r42, %r40, 5;
        mad.lo.s32 %r42, %r41, 8, %r42;
        mad.wide.u32 %rd2, %r42, 1, %rd91;
        st.global.v2.b32 [%rd2], {{%r17, %r18}}; st.global.v2.b32 [%rd2+256], {{%r19, %r20}};"""
    execute(body, both, out, shared_bytes=768)
    assert (out == a @ b).all()


@pytest.mark.parametrize(("kind", "dtype", "k"), [("f16", "f2", 8), ("tf32", "f4", 8), ("s8", "i1", 32)])
def test_tensor_cores_take_other_numbers(kind: str, dtype: str, k: int) -> None:
    """A register holds neighbours of a row of a, or of a column of b: first columns, then rows further on."""
    random = np.random.default_rng(0)
    a, b = random.integers(-9, 9, (16, k)), random.integers(-9, 9, (k, 8))
    of_sum = "s32" if kind == "s8" else "f32"
    per = 4 // np.dtype(dtype).itemsize
    row, column = np.divmod(np.arange(32)[:, None], 4)
    halves = range(k // (4 * per))
    of_a = [a[row + 8 * up, per * (column + 4 * half) + np.arange(per)] for half in halves for up in (0, 1)]
    of_b = [b.T[row, per * (column + 4 * half) + np.arange(per)] for half in halves]
    registers = [np.ascontiguousarray(each, dtype).view(np.uint32)[:, 0] for each in of_a + of_b]
    names = [
        "{{" + ", ".join(f"{{{i}}}" for i in part) + "}}"
        for part in (range(len(of_a)), range(len(of_a), len(registers)))
    ]
    name = f"mma.sync.aligned.m16n8k{k}.row.col.{of_sum}.{kind}.{kind}.{of_sum}"
    for place in range(4):
        into = "{{" + ", ".join("{d}" if place == i else "_" for i in range(4)) + "}}"
        instruction = f"{name} {into}, {names[0]}, {names[1]}, {{{{0, 0, 0, 0}}}}"
        found = computed(instruction, *registers, result="i4" if kind == "s8" else "f4")
        assert (found == (a @ b)[row + 8 * (place // 2), 2 * column + place % 2][:, 0]).all()


@pytest.mark.parametrize("how", ["", ".trans"])
def test_matrices_are_stored_as_they_are_loaded(how: str) -> None:
    numbers = np.random.default_rng(0).integers(0, 2**16, (32, 8), np.uint16)
    out = np.zeros_like(numbers)
    body = f"""shl.b32 %r80, %r90, 4; mad.wide.u32 %rd80, %r90, 16, %rd90;
        mad.wide.u32 %rd81, %r90, 16, %rd91;
        ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd80];
        st.shared.v4.b32 [%r80], {{%r1, %r2, %r3, %r4}};
        ldmatrix.sync.aligned.m8n8.x4{how}.shared.b16 {{%r5, %r6, %r7, %r8}}, [%r80];
        stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r80], {{%r5, %r6, %r7, %r8}};
        ld.shared.v4.b32 {{%r1, %r2, %r3, %r4}}, [%r80]; st.global.v4.b32 [%rd81], {{%r1, %r2, %r3, %r4}};"""
    execute(body, numbers, out, shared_bytes=512)
    matrices = numbers.reshape(4, 8, 8)
    assert (out.reshape(4, 8, 8) == (matrices.swapaxes(1, 2) if how else matrices)).all()
