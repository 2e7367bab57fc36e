"""Decode attention equals softmax(q·K)V in float64: all instruction sets, dtypes, shapes and lengths."""

from collections.abc import Callable
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from paged_case import DTYPES, TOLERANCE, PagedCase, make_case

from neo_desktop import native

ISAS = native.available_isas()
each_isa = pytest.mark.parametrize("isa", ISAS)
each_layout = pytest.mark.parametrize("paired", [False, True], ids=["rows", "pairs"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@each_layout
@each_isa
@each_dtype
@pytest.mark.parametrize("group", [1, 4, 7, 8])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256, 512, 576])
def test_equals_float64_for_every_shape(
    isa: str, paired: bool, dtype: torch.dtype, group: int, head_dim: int
) -> None:
    case = make_case([1, 15, 16, 17, 300, 1100], group=group, head_dim=head_dim, dtype=dtype, paired=paired)
    assert case.error(case.run(isa=isa)) < TOLERANCE[dtype]


@each_layout
@each_isa
@each_dtype
@pytest.mark.parametrize(("block_size", "blocks_per_page"), [(16, 4), (32, 2), (48, 3)])
def test_blocks_may_be_parts_of_the_memorys_pages(
    isa: str, paired: bool, dtype: torch.dtype, block_size: int, blocks_per_page: int
) -> None:
    case = make_case(
        [1, 16, 17, 64, 65, 700],
        group=4,
        block_size=block_size,
        blocks_per_page=blocks_per_page,
        dtype=dtype,
        paired=paired,
    )
    assert case.error(case.run(isa=isa)) < TOLERANCE[dtype]


@each_isa
@each_dtype
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("group", [1, 3, 20])
def test_keys_that_are_also_the_values_have_the_bits_of_keys_in_pairs(
    isa: str, dtype: torch.dtype, window: int, group: int
) -> None:
    shape = {"kv_heads": 2, "group": group, "head_dim": 72, "block_size": 16, "blocks_per_page": 4}
    case = make_case([1, 17, 65, 1100], dtype=dtype, window=window, **shape)  # type: ignore[arg-type]
    num_pages, kv_heads, page_tokens, head_dim = case.v_cache.shape
    keys = native.empty_paired_keys(
        num_pages, kv_heads=kv_heads, page_tokens=page_tokens, head_dim=head_dim, dtype=dtype
    )
    paired = replace(case, k_cache=keys.copy_(case.v_cache.unflatten(-1, (-1, 2))))
    assert torch.equal(replace(case, k_cache=case.v_cache).run(isa=isa), paired.run(isa=isa))


@each_layout
@each_isa
def test_where_blocks_lie_does_not_matter(isa: str, paired: bool) -> None:
    """Blocks may be adjacent in whole pages or scattered over pages: the result is the same."""
    case = make_case([300], group=4, blocks_per_page=4, paired=paired)
    expected = case.run(isa=isa)
    old = case.slots(0, torch.arange(300))
    for order in (torch.arange(20), torch.randperm(20, generator=torch.Generator().manual_seed(1))):
        moved = replace(case, block_tables=order[None].int())
        new = moved.slots(0, torch.arange(300))
        for name in ("k_cache", "v_cache"):
            cache = getattr(case, name)
            copied = torch.full_like(cache, torch.nan)
            copied[new // 64, :, new % 64] = cache[old // 64, :, old % 64]
            setattr(moved, name, copied)
        assert torch.equal(moved.run(isa=isa), expected)


@each_layout
@each_isa
@each_dtype
@pytest.mark.parametrize("window", [0, 20])
def test_sinks_take_part_in_the_softmax(isa: str, paired: bool, dtype: torch.dtype, window: int) -> None:
    """Contexts have one part or several; sinks are far below the scores, among them, or far above."""
    case = make_case([1, 40, 1100], group=3, dtype=dtype, paired=paired, window=window)
    large = [30.0, 80.0] if dtype is torch.float32 else [4.0, 6.0]  # the small rest has few bits
    with_sinks = replace(case, sinks=torch.tensor([-1e30, -1.0, 0.0, 2.5, *large]))
    assert with_sinks.error(with_sinks.run(isa=isa)) < TOLERANCE[dtype]
    none = torch.full((6,), -torch.inf)
    assert torch.equal(replace(case, sinks=none).run(isa=isa), case.run(isa=isa))


@each_layout
@each_isa
@each_dtype
@pytest.mark.parametrize("softcap", [1.5, 50.0])
def test_scores_level_off_at_a_cap(isa: str, paired: bool, dtype: torch.dtype, softcap: float) -> None:
    """Many scores exceed the cap, in contexts of one part or several; it does not apply to sinks."""
    case = make_case([1, 40, 1100], group=3, head_dim=72, dtype=dtype, paired=paired, window=700)
    capped = replace(case, q=3 * case.q, softcap=softcap)
    assert capped.error(capped.run(isa=isa)) < TOLERANCE[dtype]
    # A sink leaves little of a single token with a low score, and the small rest has few bits.
    case = make_case([60, 40, 1100], group=3, head_dim=72, dtype=dtype, paired=paired, window=700)
    with_sinks = replace(case, q=3 * case.q, softcap=softcap, sinks=torch.linspace(-3.0, 6.0, 6))
    assert with_sinks.error(with_sinks.run(isa=isa)) < TOLERANCE[dtype]


@each_layout
@each_isa
@pytest.mark.parametrize("window", [1, 15, 16, 17, 400, 5000])
def test_window_attends_to_the_last_tokens_only(isa: str, paired: bool, window: int) -> None:
    case = make_case([1, 16, 17, 700, 1500], group=4, window=window, paired=paired)
    assert case.error(case.run(isa=isa)) < TOLERANCE[torch.float32]


@each_layout
@each_isa
@pytest.mark.parametrize("q_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_query_cache_and_output_may_differ_in_dtype(
    isa: str, paired: bool, q_dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    case = make_case([40, 300], group=2, head_dim=72, dtype=torch.float16, paired=paired)
    case.q = case.q.to(q_dtype)
    out = torch.empty(case.q.shape, dtype=out_dtype)
    assert case.run(isa=isa, out=out) is out
    assert case.error(out) < TOLERANCE[out_dtype]


@each_layout
@each_isa
def test_strided_inputs_and_output(isa: str, paired: bool) -> None:
    case = make_case([9, 270], group=3, dtype=torch.float16, paired=paired)
    expected = case.run(isa=isa)
    batch, heads, head_dim = case.q.shape
    fused = torch.full((batch, 2 * heads + 5, head_dim), torch.nan, dtype=torch.float16)
    fused[:, 1 : 2 * heads : 2] = case.q
    case.q = fused[:, 1 : 2 * heads : 2]
    if not paired:
        both = torch.stack([case.k_cache, case.v_cache], dim=1)  # K and V of a block side by side
        case.k_cache, case.v_cache = both[:, 0], both[:, 1]
    wide = torch.zeros(batch, heads + 2, head_dim, dtype=torch.float16)
    case.run(isa=isa, out=wide[:, 1:-1])
    assert torch.equal(wide[:, 1:-1], expected)
    assert not wide[:, [0, -1]].any()


def large_logits(case: PagedCase) -> None:
    case.q = case.q * 40


def equal_logits(case: PagedCase) -> None:
    case.k_cache.fill_(0.5)


def one_dominant_token(case: PagedCase) -> None:
    case.k_cache[case.block_tables[1, 3], :, 2] = (case.q[1, :2] * 8).view_as(case.k_cache[0, :, 2])


def denormal_keys_and_values(case: PagedCase) -> None:
    tiny = torch.finfo(case.k_cache.dtype).smallest_normal
    case.k_cache.mul_(tiny / 16)
    if case.v_cache.dtype == torch.float16:  # smaller values would leave no digits in an fp32 result either
        case.v_cache.mul_(tiny / 16)


def alternating_signs(case: PagedCase) -> None:
    case.q[:, :, 1::2] *= -100
    case.q[:, :, ::2] *= 100


@each_isa
@each_layout
@each_dtype
@pytest.mark.parametrize(
    "spoil", [large_logits, equal_logits, one_dominant_token, denormal_keys_and_values, alternating_signs]
)
def test_adversarial_inputs(
    isa: str, paired: bool, dtype: torch.dtype, spoil: Callable[[PagedCase], None]
) -> None:
    case = make_case([1, 600], dtype=dtype, paired=paired)
    spoil(case)
    out = case.run(isa=isa, out=torch.empty(case.q.shape))
    largest_logit = max(
        float(torch.einsum("hd,thd->ht", case.q[b].double(), case.context(case.k_cache, b)).abs().max())
        for b in range(2)
    )
    # A logit of size x has an error of x * 2^-24 at best, which is the relative error of its weight.
    assert case.error(out) < 1e-5 + 2**-22 * largest_logit * case.scale


@each_layout
@each_isa
def test_non_finite_values_stay_with_the_heads_that_attend_to_them(isa: str, paired: bool) -> None:
    case = make_case([40, 300], kv_heads=2, group=2, paired=paired)
    clean = case.run(isa=isa)
    case.k_cache[case.block_tables[1, 4], 1, 3] = torch.nan
    case.v_cache[case.block_tables[0, 0], 0, 5] = torch.inf
    out = case.run(isa=isa)
    touched = torch.zeros(2, 4, dtype=torch.bool)
    touched[1, 2:] = True  # query heads 2 and 3 share KV head 1
    touched[0, :2] = True
    assert not out[touched].isfinite().any()
    assert torch.equal(out[~touched], clean[~touched])


@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_dim=st.integers(1, 32).map(lambda n: 8 * n),
    layout=st.one_of(
        st.tuples(st.just(False), st.integers(1, 40), st.integers(1, 5)),
        st.tuples(st.just(True), st.sampled_from([16, 48, 64, 80]), st.integers(1, 5)),
    ),
    dtype=st.sampled_from(DTYPES),
    isa=st.sampled_from(ISAS),
    window=st.one_of(st.just(0), st.integers(1, 700)),
    seed=st.integers(0, 1000),
)
def test_equals_float64_for_random_problems(
    lengths: list[int],
    layout: tuple[bool, int, int],
    dtype: torch.dtype,
    isa: str,
    window: int,
    seed: int,
    **shape: int,
) -> None:
    paired, block_size, blocks_per_page = layout
    case = make_case(
        lengths,
        dtype=dtype,
        window=window,
        seed=seed,
        paired=paired,
        block_size=block_size,
        blocks_per_page=blocks_per_page,
        **shape,
    )
    assert case.error(case.run(isa=isa)) < TOLERANCE[dtype]


@each_layout
@each_isa
def test_result_depends_neither_on_threads_nor_on_the_batch(isa: str, paired: bool) -> None:
    case = make_case([5000, 1, 1025, 256, *range(1, 30)], group=4, dtype=torch.float16, paired=paired)
    out = case.run(isa=isa, num_threads=1)
    for num_threads in (2, 3, 8):
        assert torch.equal(case.run(isa=isa, num_threads=num_threads), out)
    for b in range(5):
        alone = PagedCase(
            case.q[b : b + 1],
            case.k_cache,
            case.v_cache,
            case.block_tables[b : b + 1],
            case.context_lens[b : b + 1],
            case.scale,
        )
        assert torch.equal(alone.run(isa=isa), out[b : b + 1])


@each_isa
@each_layout
@pytest.mark.parametrize("present", [(), (2,), (0, 3)])
def test_rows_in_which_there_is_no_request_stay_as_they_are(
    isa: str, paired: bool, present: tuple[int, ...]
) -> None:
    case = make_case([300, 5, 40, 1100], group=2, paired=paired)
    expected = torch.full_like(case.q, 7.0)
    expected[list(present)] = case.run(isa=isa)[list(present)]
    caches = case.k_cache.nan_to_num(), case.v_cache.nan_to_num()
    for request in range(4):
        case.context_lens[request] *= request in present
    out = torch.full_like(case.q, 7.0)
    new = torch.zeros(4, case.k_cache.shape[1], 64)
    assert torch.equal(case.run(isa=isa, out=out), expected)
    case.context_lens.zero_()
    native.paged_attention_decode(
        case.q,
        case.k_cache,
        case.v_cache,
        case.block_tables,
        case.context_lens,
        1.0,
        out,
        block_size=case.block_size,
        k=new,
        v=new,
        isa=isa,
    )
    assert torch.equal(out, expected)
    assert torch.equal(case.k_cache.nan_to_num(), caches[0])
    assert torch.equal(case.v_cache.nan_to_num(), caches[1])


def test_empty_batch() -> None:
    case = make_case([5])
    out = native.paged_attention_decode(
        case.q[:0], case.k_cache, case.v_cache, case.block_tables[:0], case.context_lens[:0], 1.0
    )
    assert out.shape == (0, 2, 64)


@each_isa
@each_layout
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [0, 5, 700])
@pytest.mark.parametrize("blocks_per_page", [1, 4])
def test_the_newest_rows_may_come_with_the_call(
    isa: str, paired: bool, dtype: torch.dtype, window: int, blocks_per_page: int
) -> None:
    case = make_case(
        [1, 16, 17, 2500],
        kv_heads=3,
        group=4,
        blocks_per_page=blocks_per_page,
        dtype=dtype,
        window=window,
        paired=paired,
    )
    expected = case.run(isa=isa)
    last = torch.stack([case.slots(request, case.context_lens[request] - 1) for request in range(4)])
    pages, rows = last // (16 * blocks_per_page), last % (16 * blocks_per_page)
    caches = [case.k_cache.clone(), case.v_cache.clone()]
    new = []
    for cache in (case.k_cache, case.v_cache):
        new.append(cache[pages, :, rows].reshape(4, 3, 64).float())  # cast back to the cache's dtype
        cache[pages, :, rows] = torch.nan
    for num_threads in (1, 3):
        out = torch.empty_like(expected)
        native.paged_attention_decode(
            case.q,
            case.k_cache,
            case.v_cache,
            case.block_tables,
            case.context_lens,
            case.scale,
            out,
            num_threads,
            block_size=case.block_size,
            k=new[0],
            v=new[1],
            window=window,
            isa=isa,
        )
        assert torch.equal(out, expected)
    for cache, before in zip((case.k_cache, case.v_cache), caches, strict=True):
        assert torch.equal(cache.nan_to_num(), before.nan_to_num())


@each_layout
@each_isa
@each_dtype
@pytest.mark.parametrize("group", [1, 3, 8, 9])
@pytest.mark.parametrize("window", [0, 100])
def test_rows_of_one_sequence_have_the_bits_of_each_row_alone(
    isa: str, paired: bool, dtype: torch.dtype, group: int, window: int
) -> None:
    """The rows share readings of KV; their contexts may end in different tiles and chunks."""
    lengths = [70, 1030, 130, 5]
    whole = make_case(lengths, group=group, dtype=dtype, paired=paired, head_dim=64)
    rows = [
        (request, end) for request, end in enumerate(lengths) for end in range(end - 7, end + 1) if end > 0
    ]
    of_rows = torch.tensor([request for request, _ in rows])
    case = replace(
        whole,
        q=torch.randn(len(rows), *whole.q.shape[1:]).to(dtype),
        block_tables=whole.block_tables[of_rows],
        context_lens=torch.tensor([end for _, end in rows], dtype=torch.int32),
        window=window,
    )
    alone = [
        replace(
            case,
            q=case.q[i : i + 1],
            block_tables=case.block_tables[i : i + 1],
            context_lens=case.context_lens[i : i + 1],
        ).run(isa=isa)
        for i in range(len(rows))
    ]
    for num_threads in (1, 2, 5):
        assert torch.equal(case.run(isa=isa, num_threads=num_threads), torch.cat(alone))
    one = slice(8, 16)  # a single sequence, whose rows are divided among threads
    case = replace(
        case, q=case.q[one], block_tables=case.block_tables[one], context_lens=case.context_lens[one]
    )
    assert torch.equal(case.run(isa=isa, num_threads=4), torch.cat(alone[one]))
