"""The cpu-attention suite reports what it claims to: every case, its limits, its error, its caveats."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from suites import count_colour, drawn, ignore, last, shown

from neo_desktop import native
from neo_desktop.app.bench.cpu_attention import rivals, suite
from neo_desktop.app.bench.cpu_attention.options import CpuAttentionOptions, Shape
from neo_desktop.app.bench.cpu_attention.pool import Pool, seeded
from neo_desktop.app.bench.cpu_attention.report import CpuAttentionCase, CpuAttentionReport, RivalResult
from neo_desktop.app.bench.cpu_attention.rivals import (
    LlamaCpp,
    NoLlamaCppError,
    Rival,
    TorchSdpa,
    measure_rival,
)
from neo_desktop.app.bench.cpu_attention.suite import Limits, run_cpu_attention

SMALL = CpuAttentionOptions(
    groups=(1, 4),
    head_dims=(64,),
    context_tokens=(128, 300),
    batches=(3,),
    long_tokens=1000,
    short_requests=5,
    short_tokens=20,
    memory_bytes=16 << 20,
    seconds=0.1,
    rival_seconds=0,
    num_threads=2,
)

CASE = CpuAttentionCase(
    group=4,
    kv_heads=8,
    head_dim=64,
    batch=8,
    context_tokens=512,
    kv_bytes=8 << 20,
    calls=3,
    milliseconds=0.5,
    gb_per_s=16.8,
    read_gb_per_s=30.0,
    multiply_adds_per_s=1.1e11,
    fma_gb_per_s=55.0,
    fraction=0.56,
    limit_fraction=0.56,
    relative_error=2e-4,
    rivals={"torch_sdpa": RivalResult(2, 3, 0.7, 0.02, 2e-4)},
)


def measured(options: CpuAttentionOptions) -> CpuAttentionReport:
    return last(run_cpu_attention(options, ignore))


def report_of(*cases: CpuAttentionCase) -> CpuAttentionReport:
    return CpuAttentionReport(
        "bfloat16", 16, 64, False, 14, "avx512bf16", 1 << 30, 1 << 25, True, ("A note.",), cases
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8], ids=str)
def test_measures_every_case_against_the_limits_around_it(dtype: torch.dtype) -> None:
    report = measured(replace(SMALL, dtype=dtype))
    shapes = {(case.group, case.batch, case.context_tokens) for case in report.cases}
    assert len(report.cases) == len(shapes) == 2 * 6
    assert {(1, 3, 128), (4, 3, 300), (1, 1, 1000), (4, 1, 1000), (1, 5, 20), (4, 5, 20)} <= shapes
    row = 64 + 4 if dtype is torch.int8 else 64 * 2  # with the scale
    for case in report.cases:
        assert case.kv_bytes == case.batch * case.context_tokens * case.kv_heads * row * 2
        assert case.kv_bytes <= report.cache_bytes
        assert case.gb_per_s == pytest.approx(case.kv_bytes / case.milliseconds / 1e6)
        # One multiply-add per element and query head that shares it.
        assert case.fma_gb_per_s == pytest.approx(case.multiply_adds_per_s * row / 64 / case.group / 1e9)
        assert case.limit_fraction >= case.fraction > 0
        assert case.calls >= 3
        assert case.rivals == {}


@pytest.mark.parametrize("fragmented", [False, True])
@pytest.mark.parametrize("tokens", [20, 64, 300])
def test_blocks_lie_in_whole_pages_as_the_engines_unless_memory_is_fragmented(
    fragmented: bool, tokens: int
) -> None:
    options = replace(SMALL, fragmented=fragmented)
    pool, shape = Pool(options), Shape(group=4, head_dim=64, batch=3, context_tokens=tokens)
    tables = pool.block_tables(shape)
    blocks = -(-tokens // 16)
    assert tables.shape[1:] == (3, blocks)
    assert len(tables.unique()) == tables.numel(), "a block serves two requests"
    assert tables.min() >= 0
    assert tables.max() < pool.num_blocks(4, 64)
    assert pool.caches(4, 64).v.shape[2] == 64
    in_order = tables[..., :1] + torch.arange(blocks)
    firsts = tables[..., ::4]
    if fragmented:
        assert (firsts % 4 != 0).any()
    else:
        assert (firsts % 4 == 0).all()
        assert torch.equal(tables // 4, firsts.repeat_interleave(4, dim=-1)[..., :blocks] // 4)
        assert torch.equal(tables % 4, torch.arange(blocks).expand_as(tables) % 4)
    if blocks > 4 or (fragmented and blocks > 1):
        assert not torch.equal(tables, in_order), "nothing is scattered"


def test_a_fragmented_memory_is_measured_and_told() -> None:
    report = measured(replace(SMALL, groups=(4,), seconds=0, fragmented=True))
    assert all(case.relative_error < 1e-3 for case in report.cases)
    assert "scattered one by one" in " ".join(report.notes)
    assert (report.block_size, report.page_tokens, report.fragmented) == (16, 64, True)


def test_the_limit_is_the_smaller_one() -> None:
    limits = Limits(read_bytes_per_s=30e9, multiply_adds_per_s=100e9)
    assert limits.bytes_per_s(2.0) == 30e9
    assert limits.bytes_per_s(4.0) == 25e9
    assert limits.mean(Limits(50e9, 300e9)) == Limits(40e9, 200e9)
    assert (CASE.bound, CASE.limit_gb_per_s) == ("memory", 30.0)
    arithmetic = replace(CASE, fma_gb_per_s=20.0)
    assert (arithmetic.bound, arithmetic.limit_gb_per_s) == ("arithmetic", 20.0)


def test_where_arithmetic_is_slow_it_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite.native, "fma_rate", lambda *_, **__: 1e6)
    report = measured(SMALL)
    for case in report.cases:
        assert case.bound == "arithmetic"
        assert case.limit_fraction > 10 * case.fraction


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 5e-3), (torch.int8, 5e-3)], ids=str
)
def test_error_is_that_of_rounding_the_output(dtype: torch.dtype, tolerance: float) -> None:
    report = measured(replace(SMALL, dtype=dtype))
    assert all(0 < case.relative_error < tolerance for case in report.cases)


def test_a_wrong_kernel_shows_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = native.paged_attention_decode

    def wrong(q: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        return decode(q * 1.05, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(native, "paged_attention_decode", wrong)
    report = measured(SMALL)
    assert all(case.relative_error > 1e-3 for case in report.cases)


@pytest.mark.parametrize("isa", native.available_isas())
def test_every_instruction_set_can_be_measured(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEO_DESKTOP_ISA", isa)
    report = measured(replace(SMALL, groups=(4,), context_tokens=(128,), seconds=0))
    assert report.isa == isa
    assert all(case.relative_error < 1e-3 for case in report.cases)


def test_progress_runs_from_start_to_end() -> None:
    shares: list[float] = []
    last(run_cpu_attention(SMALL, lambda share, _: shares.append(share)))
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_says_when_the_cache_is_small_or_cases_do_not_fit() -> None:
    report = measured(replace(SMALL, long_tokens=10**6, memory_bytes=4 << 20))
    notes = " ".join(report.notes)
    assert "too small to rule out" in notes or "unknown" in notes
    assert "pages of 64 tokens, scattered" in notes
    # 2 MiB of keys are 32 pages; of group 1, 8, which hold 3 requests of 2 pages, but not of 5.
    left_out = 2 * 6 - len(report.cases)
    assert f"{left_out} cases were left out" in notes
    assert left_out >= 2
    with pytest.raises(MemoryError, match="hold no case"):
        measured(replace(SMALL, memory_bytes=4096))


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (4, 4), (6, 4), (16, 14)])
def test_leaves_two_cores_alone_where_there_are_many(
    cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "num_usable_cpus", lambda: cores)
    assert CpuAttentionOptions().threads == threads
    assert CpuAttentionOptions(num_threads=3).threads == 3


def those_there() -> list[Rival]:
    try:
        return [TorchSdpa(), LlamaCpp()]
    except NoLlamaCppError:
        return [TorchSdpa()]


@pytest.mark.parametrize("rival", those_there(), ids=lambda rival: rival.name)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rivals_do_the_same_work(rival: Rival, group: int, dtype: torch.dtype) -> None:
    """So their speed may be compared: gathered keys and values give the kernel's own result."""
    options = replace(SMALL, dtype=dtype, memory_bytes=4 << 20)
    pool = Pool(options)
    caches = pool.caches(group, head_dim=64)
    shape = Shape(group, head_dim=64, batch=3, context_tokens=40)
    table = torch.randperm(pool.num_blocks(group, 64), generator=seeded())[: 3 * 3].view(3, 3)
    q = torch.randn(3, shape.kv_heads * group, 64, generator=seeded()).to(dtype)
    out = torch.empty_like(q)
    caches.decode(q, table.int(), torch.full((3,), 40, dtype=torch.int32), out, 1)
    k, v = (
        torch.stack(
            [
                torch.stack([caches.rows(table[request], head, 40)[which] for head in range(shape.kv_heads)])
                for request in range(3)
            ]
        ).to(dtype)
        for which in range(2)
    )
    threads = torch.get_num_threads()
    with rival.prepared(q, k, v, 2) as attend:
        theirs = attend().to(dtype)
    torch.testing.assert_close(theirs, out, atol=2e-2, rtol=2e-2)
    assert torch.get_num_threads() == threads


def test_a_slow_rival_gets_a_smaller_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        name = "slow"
        batches: list[int] = []  # noqa: RUF012

        @contextmanager
        def prepared(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_threads: int
        ) -> Iterator[Callable[[], torch.Tensor]]:
            self.batches.append(len(q))
            assert (len(k), num_threads) == (len(q), 2)
            with TorchSdpa().prepared(q, k, v, num_threads) as attend:
                yield attend

    ticks = count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))  # a second passes at every look
    pool = Pool(SMALL)
    shape = Shape(group=4, head_dim=64, batch=12, context_tokens=32)
    result = measure_rival(Slow(), pool, SMALL, shape, seconds=1)
    assert (result.batch, result.calls, Slow.batches) == (1, 1, [1])
    Slow.batches.clear()
    result = measure_rival(Slow(), pool, SMALL, shape, seconds=15)
    assert (result.batch, Slow.batches[:3], set(Slow.batches[3:])) == (4, [1, 2, 4], {4})
    Slow.batches.clear()
    result = measure_rival(Slow(), pool, SMALL, shape, seconds=50)
    assert (result.batch, Slow.batches[:6]) == (12, [1, 2, 4, 8, 12, 12])
    assert min(result.gb_per_s, result.fraction) > 0
    assert result.relative_error < 1e-3


def test_says_what_it_was_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise NoLlamaCppError("llama-cpp-python is not installed")

    monkeypatch.setattr(suite, "LlamaCpp", missing)
    compared = replace(SMALL, groups=(4,), context_tokens=(128,), seconds=0, rival_seconds=0.1)
    report = measured(compared)
    assert all(case.rivals.keys() == {"torch_sdpa"} for case in report.cases)
    assert "llama-cpp-python is not installed: not compared." in report.notes
    assert any(note.startswith("torch SDPA: GB/s on KV gathered beforehand") for note in report.notes)
    ratios = [case.fraction / case.rivals["torch_sdpa"].fraction for case in report.cases]
    slower = sum(ratio < 1 for ratio in ratios)
    expected = f"slower in {slower} of {len(ratios)} cases" if slower else "faster in every case"
    assert expected in " ".join(report.notes)
    report = measured(replace(compared, dtype=torch.int8))
    assert not any(case.rivals for case in report.cases)
    assert "compared with float16 and bfloat16 KV only" in " ".join(report.notes)


def test_llama_cpp_without_its_library_is_a_reason_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(NoLlamaCppError, match="is not installed"):
        LlamaCpp()
    monkeypatch.undo()
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    with pytest.raises(NoLlamaCppError, match="cannot be used"):
        LlamaCpp()


def test_what_was_measured_before_an_interruption_is_there() -> None:
    reports = run_cpu_attention(SMALL, ignore)
    assert [len(next(reports).cases) for _ in range(3)] == [1, 2, 3]
    reports.close()  # type: ignore[attr-defined]


def test_the_table_fits_into_a_narrow_terminal() -> None:
    wide = replace(CASE, batch=1024, context_tokens=32768, milliseconds=1234.56, fma_gb_per_s=1234.0)
    wide = replace(
        wide, rivals={key: RivalResult(1, 1, 0.0123, 4e-4, 1e-3) for key in ("torch_sdpa", "llama_cpp")}
    )
    text = shown(report_of(CASE, wide).section())
    assert "…" not in text
    for wanted in ("limit", "SDPA", "llama.cpp", "1234.56", "0.012", "56%", "A note."):
        assert wanted in text


@pytest.mark.parametrize("compared", [True, False])
def test_the_plot_shows_every_case(compared: bool) -> None:
    cases = [CASE, replace(CASE, group=8, fma_gb_per_s=20.0), replace(CASE, group=8, batch=64)]
    if not compared:
        cases = [replace(case, rivals={}) for case in cases]
    shown_pixels = [drawn(plot) for plot in report_of(*cases).section().plots]
    counts = {colour: sum(count_colour(each, colour) for each in shown_pixels) for colour in COLOURS}
    for colour, of_rival in COLOURS.items():
        assert (counts[colour] > 2000) == (compared or not of_rival), counts


# Colour of bars -> whether they are a rival's.
COLOURS = {"#2f6fb0": False, "#d08700": False, "#1c8c4c": False, "#8a8a8a": True}
