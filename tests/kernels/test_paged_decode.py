"""Decode attention on the GPU equals softmax(q·K)V in float64, for any split of the contexts."""

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from fallback_levels import Levels, kernels_on
from hypothesis import given
from paged_case import PagedCase, make_case
from seeds import few_examples
from torch import Tensor

from neo_desktop.engine.kernels import in_torch
from neo_desktop.engine.kernels.dispatch import paged_decode
from neo_desktop.engine.kernels.in_triton import paged_decode as in_triton
from neo_desktop.engine.kernels.occupancy import MAX_SPLITS, MIN_SPLIT_TOKENS, num_splits

pytestmark = pytest.mark.usefixtures("kernel_level")


@pytest.fixture(scope="module", params=["tensor cores", "plain FMAs", "torch"])
def kernel_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run both Triton kernels, and torch's."""
    level = "torch" if request.param == "torch" else "triton"
    with kernels_on(level), pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_triton, "has_tensor_cores", lambda device: request.param == "tensor cores")
        yield level


DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Relative error of a head's output vector. Attention weights are rounded to V's dtype, for tensor cores.
# Where a GPU rounds to bf16, the interpreter truncates.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.5e-2}
LENGTHS = [1, 15, 16, 17, 0, 75]  # 0: padding


def attend(case: PagedCase, splits: int, device: torch.device) -> Tensor:
    """Return the kernel's output, with workspace and output filled with NaN before."""
    requests, heads, head_dim = case.q.shape
    parts = requests if splits > 1 else 0
    out, partial_out, partial_lse = (
        torch.full(shape, torch.nan, dtype=dtype, device=device)
        for shape, dtype in (
            (case.q.shape, case.q.dtype),
            ((parts, heads, splits, head_dim), torch.float32),
            ((parts, heads, splits), torch.float32),
        )
    )
    paged_decode(
        case.q.to(device),
        case.k_cache.to(device).transpose(1, 2),  # the case stores a head's tokens together
        case.v_cache.to(device).transpose(1, 2),
        case.block_tables.to(device),
        case.context_lens.to(device),
        out,
        partial_out,
        partial_lse,
        case.scale,
        case.window or None,
        None if case.sinks is None else case.sinks.to(device),
        case.softcap or None,
    )
    return out.cpu()


def check(case: PagedCase, out: Tensor, allowed: Tensor | None = None) -> None:
    """Compare with float64; `allowed` [batch, heads] adds to the tolerance. Empty contexts give zeros."""
    padding = case.context_lens == 0
    assert (out[padding] == 0).all()
    reference = case.reference()[~padding]
    error = (out[~padding].double() - reference).norm(dim=-1)
    bound = TOLERANCE[out.dtype] * reference.norm(dim=-1) + case.error_from_least_numbers()[~padding]
    if allowed is not None:
        bound += allowed[~padding]
    assert (error < bound).all()


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("group", "head_dim"),
    [
        (1, 128),
        (2, 256),
        (3, 64),
        (4, 80),
        (5, 64),
        (6, 32),
        (7, 96),
        (8, 256),
        (16, 64),
        (17, 32),
        (48, 64),
        (4, 512),
        (20, 576),
    ],
)
def test_equals_float64_for_every_shape(
    group: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    case = make_case(LENGTHS, group=group, head_dim=head_dim, dtype=dtype)
    check(case, attend(case, 4, device))


@pytest.mark.sample(2)
@pytest.mark.parametrize("block_size", [1, 5, 32, 100])
def test_any_block_size(block_size: int, device: torch.device) -> None:
    case = make_case([1, block_size, block_size + 1, 75], block_size=block_size, dtype=torch.float16)
    check(case, attend(case, 2, device))


@pytest.mark.sample(1)
@given(data=st.data())
@few_examples
def test_equals_float64_for_random_batches(data: st.DataObject, device: torch.device) -> None:
    lengths = data.draw(st.lists(st.integers(0, 130) | st.sampled_from(LENGTHS), min_size=1, max_size=4))
    case = make_case(
        lengths,
        kv_heads=data.draw(st.integers(1, 3)),
        group=data.draw(st.sampled_from([1, 3, 4, 7, 8])),
        head_dim=data.draw(st.sampled_from([64, 80, 128])),
        block_size=data.draw(st.sampled_from([16, 16, 5, 32])),
        dtype=data.draw(st.sampled_from(DTYPES)),
        window=data.draw(st.just(0) | st.integers(1, 140)),
        seed=data.draw(st.integers(0, 2**16)),
    )
    if data.draw(st.booleans()):
        generator = torch.Generator().manual_seed(len(lengths))
        case.sinks = 5 * torch.randn(case.q.shape[1], generator=generator)
    check(case, attend(case, data.draw(st.integers(1, 20)), device))


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("group", [2, 5])
def test_scores_level_off_at_a_cap(group: int, splits: int, dtype: torch.dtype, device: torch.device) -> None:
    """Many scores exceed the cap, which does not apply to sinks."""
    case = make_case([1, 40, 150], group=group, dtype=dtype, window=100)
    case.q, case.softcap, case.sinks = 3 * case.q, 1.5, torch.linspace(-3.0, 6.0, 2 * group)
    check(case, attend(case, splits, device))


@pytest.mark.sample(2)
@pytest.mark.parametrize("window", [1, 15, 16, 17, 70, 5000])
def test_window_attends_to_the_last_tokens_only(window: int, device: torch.device) -> None:
    case = make_case([1, 16, 17, 150], group=4, window=window)
    check(case, attend(case, 2, device))


@pytest.mark.sample(1)
def test_torch_gives_the_same_piece_by_piece(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, levels: Levels
) -> None:
    """A window covers another part of every context, and some contexts end several pieces earlier."""
    levels(paged_decode="torch")
    for piece_tokens, window in product((1, 7, 16, 64), (0, 20)):
        case = make_case([1, 16, 0, 17, 150], group=4, window=window)
        kv_heads, head_dim = case.k_cache.shape[1], case.q.shape[2]
        most = 2 * len(case.q) * kv_heads * head_dim * 4 * piece_tokens
        monkeypatch.setattr(in_torch, "PIECE_BYTES", most)
        width = 16 * case.block_tables.shape[1]
        assert in_torch.num_pieces(len(case.q), kv_heads, head_dim, width) == -(-width // piece_tokens)
        check(case, attend(case, 1, device))


@pytest.mark.sample(1)
def test_large_scores_do_not_overflow(device: torch.device) -> None:
    case = make_case([100, 3], group=4)
    case.q *= 1e4  # one token gets all the weight, unless two scores differ only by rounding
    check(case, attend(case, 4, device), allowed=case.error_from_scores())


@pytest.mark.sample(0)
def test_queries_and_outputs_may_be_parts_of_wider_rows(device: torch.device) -> None:
    case = make_case(LENGTHS, group=4, dtype=torch.float16)
    expected = attend(case, 2, device)
    wide = torch.full((len(LENGTHS), 11, 64), torch.nan, dtype=torch.float16)
    wide[:, 2:10] = case.q
    case.q = wide[:, 2:10]
    assert torch.equal(attend(case, 2, device), expected)


@pytest.mark.sample(0)
def test_caches_may_lie_token_by_token(device: torch.device) -> None:
    case = make_case(LENGTHS, group=4, dtype=torch.float16)
    expected = attend(case, 2, device)
    for name in ("k_cache", "v_cache"):
        rows = getattr(case, name).transpose(1, 2).contiguous()
        setattr(case, name, rows.transpose(1, 2))
    assert torch.equal(attend(case, 2, device), expected)


@pytest.mark.sample(1)
def test_nan_stays_with_the_request_that_has_it(device: torch.device) -> None:
    case = make_case([40, 40, 40], group=2)
    expected = attend(case, 2, device)
    case.k_cache[case.block_tables[1, 1], :, 3] = torch.nan
    out = attend(case, 2, device)
    assert out[1].isnan().all()
    assert torch.equal(out[::2], expected[::2])


@pytest.mark.sample(1)
@given(
    requests=st.integers(1, 512),
    kv_heads=st.integers(1, 64),
    max_tokens=st.integers(1, 2**20),
    num_programs=st.integers(1, 1000),
)
def test_number_of_splits(requests: int, kv_heads: int, max_tokens: int, num_programs: int) -> None:
    splits = num_splits(requests, kv_heads, max_tokens, num_programs)
    assert splits <= max(1, min(MAX_SPLITS, max_tokens // MIN_SPLIT_TOKENS))
    assert splits >= num_splits(requests + 1, kv_heads, max_tokens, num_programs)


@pytest.mark.sample(1)
def test_one_long_request_uses_the_whole_gpu() -> None:
    assert 328 - 8 < 8 * num_splits(1, 8, 32_768, 328) <= 328


@pytest.mark.sample(2)
@pytest.mark.parametrize("splits", [1, 2])
def test_without_parts_nothing_is_merged(
    splits: int, device: torch.device, levels: Levels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One split needs no workspace and no second launch."""
    levels(paged_decode="triton")
    launches = []
    merge = in_triton._merge

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launches.append(grid)
            return merge[grid]

    monkeypatch.setattr(in_triton, "_merge", Counted())
    case = make_case(LENGTHS, group=3)
    check(case, attend(case, splits, device))
    assert len(launches) == splits - 1


@pytest.mark.sample(1)
def test_programs_of_a_compiled_kernel() -> None:
    """Four programs of 128 threads with 128 registers each fill the registers of a 7.5 multiprocessor."""
    compiled = SimpleNamespace(n_regs=128, metadata=SimpleNamespace(shared=2048, num_warps=4))
    assert in_triton.programs_of(compiled, 75) == 4
    assert in_triton.programs_of(None, 75) is None  # Triton's interpreter
    assert in_triton.programs_of(SimpleNamespace(metadata=compiled.metadata), 75) is None
