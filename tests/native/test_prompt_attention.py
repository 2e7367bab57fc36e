"""Prompt attention equals softmax(q·K)V, and a row has the same bits in any chunk and as a decode."""

from itertools import accumulate, pairwise

import hypothesis.strategies as st
import pytest
import torch
from dense_attention import dense
from hypothesis import given
from paged_case import DTYPES
from torch import Tensor

from neo_desktop import native

ISAS = native.available_isas()
PAGE = 64
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def chunks_of(cuts: list[int], first: int = 0) -> Tensor:
    """Return the bounds of one request's chunks: chunk i ends with token cuts[i], on a context copy."""
    lengths = [end - begin for begin, end in pairwise((first, *cuts))], cuts
    return torch.tensor([list(accumulate(each, initial=0)) for each in lengths], dtype=torch.int32)


@given(data=st.data())
@pytest.mark.parametrize("isa", ISAS)
def test_a_row_has_the_same_bits_in_any_chunk_and_as_a_decode(isa: str, data: st.DataObject) -> None:
    group, kv_heads = data.draw(st.sampled_from([(1, 2), (3, 2), (4, 1), (9, 1)]))
    head_dim = data.draw(st.sampled_from([8, 24, 64, 80]))
    dtype = data.draw(st.sampled_from(DTYPES))
    length = data.draw(st.integers(1, 150) | st.integers(1020, 1100))
    first = max(0, length - data.draw(st.integers(1, 150)))  # the first token with a query
    window = data.draw(st.sampled_from([0, 0, 1, 30, 64, 1024, 1050]))
    softcap = data.draw(st.sampled_from([0.0, 0.0, 2.0]))
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    q = torch.randn(length - first, group * kv_heads, head_dim).to(dtype)
    k, v = torch.randn(2, length, kv_heads, head_dim).to(dtype)
    sinks = torch.randn(len(q[0])) if data.draw(st.booleans()) else None
    cuts = sorted({*data.draw(st.lists(st.integers(first + 1, length), max_size=4)), length})
    scale = head_dim**-0.5

    def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, num_threads: int) -> Tensor:
        return native.prompt_attention(
            q, k, v, ends, scale, None, num_threads, window=window, sinks=sinks, softcap=softcap, isa=isa
        )

    whole = attend(q, k, v, chunks_of([length], first), 2)
    expected = dense(q, k, v, scale, window or None, sinks, softcap or None)
    torch.testing.assert_close(whole.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])

    contexts = [torch.cat([x[:end] for end in cuts]) for x in (k, v)]
    chunked = attend(q, contexts[0], contexts[1], chunks_of(cuts, first), data.draw(st.integers(1, 3)))
    assert torch.equal(chunked, whole)

    if dtype is torch.bfloat16:  # dot-product instructions would add up in another order
        q, k, v = q.float(), k.float(), v.float()
        whole = attend(q, k, v, chunks_of([length], first), 1)
    pages = -(-length // PAGE)
    keys = native.empty_paired_keys(
        pages, kv_heads=kv_heads, page_tokens=PAGE, head_dim=head_dim, dtype=k.dtype
    )
    values = torch.zeros(pages, kv_heads, PAGE, head_dim, dtype=k.dtype)
    native.paged_kv_write(k, v, keys, values, torch.arange(length))
    lens = torch.tensor(cuts, dtype=torch.int32)
    tables = torch.arange(pages, dtype=torch.int32).expand(len(cuts), -1).contiguous()
    decoded = native.paged_attention_decode(
        q[lens - 1 - first],
        keys,
        values,
        tables,
        lens,
        scale,
        window=window,
        sinks=sinks,
        softcap=softcap,
        isa=isa,
    )
    assert torch.equal(decoded, whole[lens - 1 - first])


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_not_finite_reaches_the_rows_that_see_it_alone(isa: str) -> None:
    q, k, v = torch.randn(100, 6, 16), *torch.randn(2, 100, 2, 16)
    k[70, 0, 3], v[71, 1, 5] = torch.nan, torch.inf
    out = native.prompt_attention(q, k, v, chunks_of([100]), 0.3, isa=isa, window=20)
    rows = torch.arange(100)
    sees = [(rows >= first) & (rows < first + 20) for first in (70, 71)]
    for heads, seen in zip((out[:, :3], out[:, 3:]), sees, strict=True):
        assert torch.equal(heads.isfinite().all(-1).all(-1), ~seen)
