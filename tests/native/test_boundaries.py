"""Wrong arguments are refused by name, before anything is read or written."""

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from paged_case import PagedCase, make_case

from neo_desktop import native


def arguments() -> dict[str, object]:
    case = make_case([5, 40], group=2, window=0)
    return {
        "q": case.q,
        "k_cache": case.k_cache,
        "v_cache": case.v_cache,
        "block_tables": case.block_tables,
        "context_lens": case.context_lens,
        "scale": 0.125,
        "out": torch.empty(case.q.shape),
    }


Change = Callable[[torch.Tensor], object]


@pytest.mark.parametrize(
    ("argument", "change", "complaint"),
    [
        ("q", lambda t: t[0], r"q has shape \[4, 64\]; expected 3 dimensions \[batch, heads, head_dim\]"),
        ("q", lambda t: t[:, :, :32], r"q has shape \[2, 4, 32\]; expected \[2, 4, 64\]"),
        ("q", lambda t: t[:, :3], r"q has 3 heads; expected a multiple of the cache's 2 KV heads"),
        ("q", lambda t: t[:, :0], r"q has 0 heads"),
        ("q", lambda t: t.int(), r"q has dtype int32; expected float32 or float16 or bfloat16"),
        ("q", lambda t: t.double(), r"q has dtype torch.float64"),
        ("q", lambda t: t.to("meta"), r"q is on meta; expected a CPU tensor"),
        ("q", lambda t: t.to_sparse(), r"q has layout torch.sparse_coo"),
        ("q", lambda t: t.mT.contiguous().mT, r"q has strides .*; its last 1 dimension must be contiguous"),
        ("k_cache", lambda t: t[0], r"k_cache has shape .* 4 dimensions \[num_pages, kv_heads, page_tokens"),
        ("k_cache", lambda t: t[:0], r"v_cache has shape"),
        ("k_cache", lambda t: t.half(), r"v_cache has dtype float32; expected float16"),
        (
            "k_cache",
            lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
            r"k_cache has strides .* last 2",
        ),
        ("v_cache", lambda t: t[:, :, :8], r"v_cache has shape .*; expected .* = the shape of k_cache"),
        ("v_cache", lambda t: t[:, :, ::2].repeat(1, 1, 2, 2)[..., ::2], r"v_cache has strides"),
        ("block_tables", lambda t: t.long(), r"block_tables has dtype int64; expected int32"),
        ("block_tables", lambda t: t[0], r"block_tables has shape"),
        ("block_tables", lambda t: t[:1], r"block_tables has shape \[1, 4\]; expected \[2, 4\]"),
        (
            "block_tables",
            lambda t: t[:, :2],
            r"context_lens\[1\] is 40, beyond the 32 tokens of its block table",
        ),
        ("block_tables", lambda t: t[:, :0], r"context_lens\[0\] is 5, beyond the 0 tokens"),
        ("block_tables", lambda t: t.mT.contiguous().mT, r"block_tables has strides"),
        ("context_lens", lambda t: t.long(), r"context_lens has dtype int64; expected int32"),
        ("context_lens", lambda t: t[:1], r"context_lens has shape \[1\]; expected \[2\]"),
        ("context_lens", lambda t: t.repeat(2)[::2], r"context_lens has strides"),
        ("context_lens", lambda t: -t, r"context_lens\[0\] is -5; there are no fewer than 0 tokens"),
        ("out", lambda t: t[:1], r"out has shape \[1, 4, 64\]; expected \[2, 4, 64\] = the shape of q"),
        ("out", lambda t: t[:1].expand(2, -1, -1), r"out is expanded in dimension 0"),
        ("out", lambda t: t.mT.contiguous().mT, r"out has strides"),
        ("scale", lambda _: float("nan"), r"scale is -?nan; expected a finite number"),
        ("softcap", lambda _: float("inf"), r"softcap is inf; expected 0 \(none\) or a positive number"),
        ("softcap", lambda _: -50.0, r"softcap is -50"),
        ("window", lambda _: -1, r"window is -1"),
        ("sinks", lambda _: torch.zeros(3), r"sinks has shape \[3\]; expected \[4\] = \[heads of q\]"),
        ("sinks", lambda _: torch.zeros(4).half(), r"sinks has dtype float16; expected float32"),
        ("sinks", lambda _: torch.zeros(8)[::2], r"sinks has strides"),
        ("block_size", lambda _: 0, r"block_size is 0; expected at least 1 token"),
        ("block_size", lambda _: 32, r"block_size is 32; expected a divisor of the 16 tokens of the cache's"),
        ("block_size", lambda _: 8, r"context_lens\[1\] is 40, beyond the 32 tokens .*\(4 blocks of 8\)"),
        ("num_threads", lambda _: -1, r"num_threads is -1; expected 0 \(the default\) to 1024"),
        ("num_threads", lambda _: 5000, r"num_threads is 5000"),
        ("isa", lambda _: "sse9", r"isa 'sse9' is unknown; choose scalar"),
    ],
)
def test_decode_names_the_wrong_argument(argument: str, change: Change, complaint: str) -> None:
    given = arguments()
    given[argument] = change(given.get(argument))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=complaint):
        native.paged_attention_decode(**given)


def paired_arguments() -> dict[str, object]:
    case = make_case([5, 40], group=2, paired=True, dtype=torch.float16)
    return arguments() | {"q": case.q, "k_cache": case.k_cache, "v_cache": case.v_cache, "scale": 0.125}


def test_new_rows_are_checked() -> None:
    given = paired_arguments()
    rows = torch.ones(2, 2, 64)
    with pytest.raises(ValueError, match=r"v has shape \[2, 2, 32\]; expected \[2, 2, 64\] = \[batch of q"):
        native.paged_attention_decode(**given, k=rows, v=rows[..., :32].contiguous())


@given(
    data=st.data(),
    block_size=st.integers(1, 20),
    blocks_per_page=st.integers(1, 4),
    window=st.sampled_from([0, 1, 30]),
)
def test_out_of_range_blocks_are_refused_wherever_they_are_used(
    data: st.DataObject, block_size: int, blocks_per_page: int, window: int
) -> None:
    case = make_case(
        [70, 3, 41], head_dim=8, block_size=block_size, blocks_per_page=blocks_per_page, window=window
    )
    request = data.draw(st.integers(0, 2))
    length = int(case.context_lens[request])
    first_used = max(0, length - window) // block_size if window else 0
    entry = data.draw(st.integers(0, case.block_tables.shape[1] - 1))
    num_blocks = case.k_cache.shape[0] * blocks_per_page
    bad = data.draw(st.one_of(st.integers(-(2**31), -1), st.integers(num_blocks, 2**31 - 1)))
    case.block_tables[request, entry] = bad
    if first_used <= entry <= (length - 1) // block_size:
        with pytest.raises(ValueError, match=rf"block_tables\[{request}, {entry}\] is {bad}, outside"):
            case.run()
    else:
        assert case.run().isfinite().all()


@given(length=st.integers(-(2**31), 2**31 - 1))
def test_any_length_is_either_served_or_refused(length: int) -> None:
    case = make_case([40, 40], head_dim=8)
    case.block_tables = case.block_tables[:, :3].contiguous()
    case.k_cache.nan_to_num_()
    case.v_cache.nan_to_num_()
    case.context_lens[1] = length
    if 0 <= length <= 48:
        assert case.run(out=torch.zeros_like(case.q)).isfinite().all()
    else:
        with pytest.raises(ValueError, match=rf"context_lens\[1\] is {length}"):
            case.run()


def test_a_refused_call_leaves_the_output_alone() -> None:
    case: PagedCase = make_case([5, 40])
    case.context_lens[1] = 1000
    out = torch.full(case.q.shape, 7.0)
    with pytest.raises(ValueError, match="context_lens"):
        case.run(out=out)
    assert bool((out == 7).all())
