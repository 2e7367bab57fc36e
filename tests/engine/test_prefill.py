"""Each kernel gives prompt chunks the right context, and each device gets its best kernel."""

from itertools import pairwise
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from dense_attention import dense
from hypothesis import given
from torch import Tensor

from neo_desktop.engine.execute import prefill, prefill_kernels
from neo_desktop.engine.execute.prefill import Prefill, PrefillGroup, groups_of
from neo_desktop.engine.execute.prefill_kernels import (
    PrefillKernel,
    causal_attention,
    check_operator,
    choose_kernel,
)
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.models.attention import AttentionSpec

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
SCALE = 0.3
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def make_chunks(lengths: list[tuple[int, int]], first_row: int = 0) -> list[Prefill]:
    """Return chunks of (tokens before, tokens)."""
    chunks = []
    for start, count in lengths:
        rows = slice(first_row, first_row + count)
        chunks.append(Prefill(rows, start, torch.zeros(start + count, dtype=torch.int64)))
        first_row = rows.stop
    return chunks


def flash_as_documented(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ends: Tensor,
    k_ends: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, Tensor]:
    """Sequences are concatenated; each last query sees the last key and `window_size_left` keys before it."""
    assert q_ends.dtype == k_ends.dtype == torch.int32
    assert (dropout, return_debug_mask, window_size_right) == (0.0, False, 0)
    assert is_causal == (window_size_left == -1)
    parts, sums = [], []
    for (q_begin, q_end), (k_begin, k_end) in zip(
        pairwise(q_ends.tolist()), pairwise(k_ends.tolist()), strict=True
    ):
        assert q_end - q_begin <= max_q
        assert k_end - k_begin <= max_k
        window = None if is_causal else window_size_left + 1
        rows = q[q_begin:q_end], k[k_begin:k_end], v[k_begin:k_end]
        parts.append(dense(*rows, scale, window))
        sums.append(lse_of(*rows, scale, window))
    return torch.cat(parts).to(q.dtype), torch.cat(sums, 1)


def lse_of(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Return log(sum(exp(scores))) [heads, queries] float32, from a sink's share beside values of one."""
    kept = dense(q, k, torch.ones_like(v), scale, window, torch.zeros(q.shape[1]))
    return kept[:, :, 0].logit().t().float()


def efficient_as_documented(
    q: Tensor, k: Tensor, v: Tensor, *others: object, scale: float
) -> tuple[Tensor, Tensor]:
    """Tensors are [batch, tokens, heads, head_dim]; type 2 masks are causal, the last query sees all keys."""
    assert others[:-1] == (None, None, None, None, None, 0.0, 2)
    assert q.shape[2] == k.shape[2] == v.shape[2], "this kernel knows no grouped queries"
    found = torch.stack([dense(*rows, scale, None) for rows in zip(q, k, v, strict=True)]).to(q.dtype)
    if not others[-1]:
        return found, found.new_empty(len(q), q.shape[2], 0)
    sums = torch.stack([lse_of(*rows, scale, None) for rows in zip(q, k, v, strict=True)])
    return found, torch.nn.functional.pad(sums, (0, -q.shape[1] % 32), value=torch.inf)


@given(data=st.data())
@pytest.mark.parametrize("kernel", PrefillKernel)
def test_every_kernel_is_asked_for_the_same(kernel: PrefillKernel, data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=4))
    window = data.draw(st.none() | st.integers(1, 12))
    piece_scores = data.draw(st.sampled_from([1, 20, prefill_kernels.PIECE_SCORES]))
    sinks = torch.randn(HEADS) * 3 if data.draw(st.booleans()) else None
    softcap = data.draw(st.sampled_from([None, None, 0.8]))
    if kernel is PrefillKernel.EFFICIENT:
        window = None  # this kernel is never chosen with a window
    first_row = data.draw(st.integers(0, 3))
    chunks = make_chunks(lengths, first_row)
    q, out = torch.randn(2, chunks[-1].rows.stop + 1, HEADS, HEAD_DIM)
    kv = torch.randn(2, len(q), KV_HEADS, HEAD_DIM)
    earlier = [torch.randn(2, start, KV_HEADS, HEAD_DIM) if start else None for start, _ in lengths]
    untouched = out.clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "kernel_on", lambda *_: kernel)
        operators = SimpleNamespace(
            _flash_attention_forward=flash_as_documented,
            _efficient_attention_forward=efficient_as_documented,
        )
        patch.setattr(torch.ops, "aten", operators)
        patch.setattr(prefill_kernels, "PIECE_SCORES", piece_scores)
        patch.setattr(prefill, "PACKED_TOKENS", data.draw(st.sampled_from([1, 20, 1000])))
        before = iter(earlier)
        for group in groups_of(chunks):
            contexts = group.pack(kv, [next(before) for _ in group.chunks])
            group.attend(q, contexts, out, AttentionSpec(SCALE, window, sinks, softcap))

    for chunk, rows in zip(chunks, earlier, strict=True):
        keys, values = (
            x[chunk.rows] if rows is None else torch.cat((rows[i], x[chunk.rows])) for i, x in enumerate(kv)
        )
        expected = dense(q[chunk.rows], keys, values, SCALE, window, sinks, softcap)
        torch.testing.assert_close(out[chunk.rows].double(), expected, atol=1e-5, rtol=1e-4)
        untouched[chunk.rows] = out[chunk.rows]
    assert torch.equal(out, untouched)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (9, 9), (3, 9), (1, 9)])
@pytest.mark.parametrize("window", [None, 4, 100])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_causal_attention_equals_dense(
    num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    q = torch.randn(num_queries, HEADS, HEAD_DIM).to(dtype)
    k, v = torch.randn(2, num_keys, KV_HEADS, HEAD_DIM).to(dtype)
    for sinks in (None, torch.randn(HEADS).to(dtype)):
        out = causal_attention(q, k, v, AttentionSpec(SCALE, window, sinks))
        tolerance = 4 * torch.finfo(dtype).eps
        expected = dense(q, k, v, SCALE, window, sinks)
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "windowed", "kernel"),
    [
        (None, BF16, 128, False, PrefillKernel.NATIVE),  # CPU
        (None, FP32, 128, True, PrefillKernel.NATIVE),
        ((7, 5), FP16, 128, False, PrefillKernel.EFFICIENT),  # Turing
        ((7, 5), FP16, 128, True, PrefillKernel.SDPA),
        ((7, 5), FP32, 64, False, PrefillKernel.EFFICIENT),
        ((8, 0), FP16, 128, False, PrefillKernel.FLASH),
        ((8, 6), BF16, 64, True, PrefillKernel.FLASH),
        ((8, 9), FP16, 80, False, PrefillKernel.FLASH),
        ((9, 0), BF16, 256, True, PrefillKernel.FLASH),
        ((12, 0), BF16, 128, False, PrefillKernel.FLASH),
        ((9, 0), FP32, 128, False, PrefillKernel.EFFICIENT),  # flash supports 16 bits only
        ((9, 0), FP32, 128, True, PrefillKernel.SDPA),
        ((9, 0), FP16, 264, False, PrefillKernel.EFFICIENT),
        ((9, 0), FP16, 100, False, PrefillKernel.EFFICIENT),
    ],
)
def test_each_device_gets_its_best_kernel(
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    head_dim: int,
    windowed: bool,
    kernel: PrefillKernel,
) -> None:
    assert choose_kernel(capability, dtype, head_dim, windowed) is kernel


def test_no_better_kernel_is_chosen_than_the_ladder_allows() -> None:
    for windowed, efficient in ((False, PrefillKernel.EFFICIENT), (True, PrefillKernel.SDPA)):
        assert choose_kernel((8, 6), BF16, 128, windowed, "memory-efficient") is efficient
        assert choose_kernel((8, 6), BF16, 128, windowed, "math") is PrefillKernel.MATH
    assert choose_kernel(None, FP32, 64, False, "math") is PrefillKernel.NATIVE


def attend_on_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], window: int | None) -> None:
    """Attend with a GPU's kernels on CPU tensors, and compare."""
    q = torch.randn(8, HEADS, HEAD_DIM).half()
    contexts = torch.randn(2, 12, KV_HEADS, HEAD_DIM).half()
    out = torch.full_like(q, torch.nan)
    chunk = Prefill(slice(0, 8), 4, torch.zeros(12, dtype=torch.int64))
    monkeypatch.setattr(prefill, "kernel_on", lambda device, *others: choose_kernel(capability, *others))
    PrefillGroup.of((chunk,)).attend(q, contexts, out, AttentionSpec(SCALE, window))
    expected = dense(q, contexts[0], contexts[1], SCALE, window)
    torch.testing.assert_close(out.double(), expected, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize(
    ("capability", "window", "refused", "level"),
    [
        ((8, 6), None, {"flash"}, "memory-efficient"),
        ((8, 6), None, {"flash", "efficient"}, "math"),
        ((8, 6), 5, {"flash"}, "memory-efficient"),
        ((8, 6), 5, {"flash", "sdpa"}, "math"),
        ((7, 5), None, {"efficient"}, "math"),
        ((7, 5), 5, {"sdpa"}, "math"),
    ],
)
def test_a_kernel_that_torch_refuses_gives_way_to_the_next_one(
    capability: tuple[int, int],
    window: int | None,
    refused: set[str],
    level: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(
        torch.ops,
        "aten",
        SimpleNamespace(
            _flash_attention_forward=refuse if "flash" in refused else flash_as_documented,
            _efficient_attention_forward=refuse if "efficient" in refused else efficient_as_documented,
        ),
    )
    if "sdpa" in refused:
        monkeypatch.setattr(prefill_kernels.F, "scaled_dot_product_attention", refuse)
    for _ in range(2):
        attend_on_a_gpu(monkeypatch, capability, window)
    assert fallbacks.limits() == {"prompt_attention": level}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (2 if level == "math" and capability == (8, 6) else 1)
    assert all("No available kernel" in line for line in lines)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), torch.AcceleratorError("CUDA error: misaligned address")]
)
def test_neither_a_lack_of_memory_nor_a_lost_gpu_is_the_kernels_fault(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(torch.ops, "aten", SimpleNamespace(_flash_attention_forward=fail))
    with pytest.raises(RuntimeError) as raised:
        attend_on_a_gpu(monkeypatch, (8, 6), None)
    assert raised.value is error
    assert not fallbacks.limits()


@pytest.mark.parametrize("kernel", PrefillKernel)
def test_the_installed_torch_has_every_operator(kernel: PrefillKernel) -> None:
    check_operator(kernel)


@given(lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), max_size=8))
def test_groups_keep_all_chunks_in_order_and_small(lengths: list[tuple[int, int]]) -> None:
    chunks = make_chunks(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "PACKED_TOKENS", 50)
        groups = list(groups_of(chunks))
    assert [id(chunk) for group in groups for chunk in group.chunks] == [id(chunk) for chunk in chunks]
    for group in groups:
        assert len(group.slots) <= 50 or len(group.chunks) == 1
        assert group.ends[1, -1] == len(group.slots)
        assert group.ends[0, -1] == group.rows.stop - group.rows.start
    for group, following in pairwise(groups):  # no neighbors could have been merged
        assert len(group.slots) + following.chunks[0].context_len > 50
