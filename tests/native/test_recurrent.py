"""Recurrent states and short convolutions equal float64, and transformers' Gated DeltaNet and Mamba-2."""

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from neo_desktop import native

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
isas = st.sampled_from(native.available_isas())
dtypes = st.sampled_from(list(TOLERANCES))
lengths = st.lists(st.integers(0, 70), min_size=1, max_size=4)


def spans_of(counts: list[int], sources: Sequence[int] = (-1,), targets: Sequence[int] = (0,)) -> Tensor:
    ends = torch.tensor(counts).cumsum(0).tolist()
    rows = zip([0, *ends], ends, sources, targets, strict=False)
    return torch.tensor(list(rows), dtype=torch.int32)


def scanned(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, is_delta: bool
) -> tuple[Tensor, Tensor]:
    """Scan one request in float64; return its output and its state."""
    shared = v.shape[1] // q.shape[1]
    q, k = (x.double().repeat_interleave(shared, 1) for x in (q, k))
    out, state = torch.zeros(v.shape, dtype=torch.float64), state.double()
    for token in range(len(v)):
        state = state * decay[token].double().exp()[:, None, None]
        delta = v[token].double()
        if is_delta:
            delta = delta - torch.einsum("hkv,hk->hv", state, k[token])
        state = state + k[token][:, :, None] * (delta * beta[token].double()[:, None])[:, None, :]
        out[token] = torch.einsum("hkv,hk->hv", state, q[token])
    return out, state


@given(
    counts=lengths,
    key_heads=st.integers(1, 3),
    shared=st.integers(1, 3),
    key_dim=st.sampled_from((1, 8, 20, 64, 128)),
    value_dim=st.sampled_from((1, 7, 16, 33, 64, 100, 128)),
    is_delta=st.booleans(),
    dtype=dtypes,
    isa=isas,
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_states_equal_float64(
    counts: list[int],
    key_heads: int,
    shared: int,
    key_dim: int,
    value_dim: int,
    is_delta: bool,
    dtype: torch.dtype,
    isa: str,
    threads: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    tokens, heads = sum(counts), key_heads * shared
    q, k = (
        torch.nn.functional.normalize(torch.randn(tokens, key_heads, key_dim), dim=-1).to(dtype) for _ in "qk"
    )
    v, decay = torch.randn(tokens, heads, value_dim).to(dtype), -torch.rand(tokens, heads)
    beta = torch.rand(tokens, heads)
    state = torch.randn(2 * len(counts) + 1, heads, key_dim, value_dim)
    before, out = state.clone(), torch.full_like(v, torch.nan)
    slots = torch.randperm(len(state)).tolist()
    sources = [(slot, slot, -1)[slot % 3] for slot in slots[: len(counts)]]
    targets = [
        (source, slot, slot)[slot % 3] for source, slot in zip(sources, slots[-len(counts) :], strict=True)
    ]
    spans = spans_of(counts, sources, targets)
    native.scan_state(q, k, v, decay, beta, state, spans, out, threads, is_delta=is_delta, isa=isa)
    for first, end, source, target in spans.tolist():
        own = slice(first, end)
        given = before[source] if source >= 0 else torch.zeros_like(before[0])
        expected, after = scanned(q[own], k[own], v[own], decay[own], beta[own], given, is_delta)
        scale = max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
        torch.testing.assert_close(out[own].double(), expected, rtol=0, atol=TOLERANCES[dtype] * scale * 4)
        if target >= 0:
            torch.testing.assert_close(state[target].double(), after, rtol=1e-4, atol=1e-4)
    others = [slot for slot in range(len(state)) if slot not in targets]
    assert torch.equal(state[others], before[others])


@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=5), isa=isas, seed=st.integers(0, 2**31))
def test_chunks_of_any_size_give_the_same_numbers(cuts: list[int], isa: str, seed: int) -> None:
    torch.manual_seed(seed)
    tokens = sum(cuts)
    q, k, v = (torch.randn(tokens, 2, 24) * 0.3 for _ in "qkv")
    decay, beta = -torch.rand(tokens, 2), torch.rand(tokens, 2)
    whole, pieces = (torch.zeros(1, 2, 24, 24) for _ in "ab")
    out, parts = torch.empty_like(v), torch.empty_like(v)
    native.scan_state(q, k, v, decay, beta, whole, spans_of([tokens]), out, is_delta=True, isa=isa)
    first = 0
    for count in cuts:
        own = slice(first, first + count)
        rows = q[own], k[own], v[own], decay[own], beta[own]
        native.scan_state(*rows, pieces, spans_of([count], [0]), parts[own], 1, is_delta=True, isa=isa)
        first += count
    assert torch.equal(out, parts)
    assert torch.equal(whole, pieces)


@given(
    counts=lengths,
    channels=st.sampled_from((1, 8, 30, 64, 65, 200)),
    width=st.integers(2, 8),
    has_bias=st.booleans(),
    has_silu=st.booleans(),
    in_place=st.booleans(),
    dtype=dtypes,
    isa=isas,
    seed=st.integers(0, 2**31),
)
def test_convolutions_equal_float64(
    counts: list[int],
    channels: int,
    width: int,
    has_bias: bool,
    has_silu: bool,
    in_place: bool,
    dtype: torch.dtype,
    isa: str,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(sum(counts), channels).to(dtype)
    weight, bias = torch.randn(width, channels), torch.randn(channels) if has_bias else None
    state = torch.randn(len(counts), width - 1, channels).to(dtype).float()
    before, slots = state.clone(), range(len(counts))
    out = x.clone() if in_place else torch.full_like(x, torch.nan)
    spans = spans_of(counts, slots, slots)
    native.short_convolution(
        out if in_place else x, weight, bias, state, spans, out, has_silu=has_silu, isa=isa
    )
    for i, (first, end, *_) in enumerate(spans.tolist()):
        own = slice(first, end)
        padded = torch.cat((before[i], x[own].float())).double()
        sums = sum(weight[j].double() * padded[j : j + counts[i]] for j in range(width))
        sums = sums if bias is None else sums + bias.double()
        expected = torch.nn.functional.silu(sums) if has_silu else sums
        torch.testing.assert_close(
            out[own].double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * 8
        )
        assert torch.equal(state[i], padded[counts[i] :].float())


def test_it_is_the_gated_delta_rule_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 150, 4, 32), torch.randn(1, 150, 4, 32), torch.randn(1, 150, 8, 48)
    decay, beta = -torch.rand(1, 150, 8), torch.rand(1, 150, 8)
    expected, after = modeling.torch_chunk_gated_delta_rule(
        q, k, v, decay, beta, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    q, k = (modeling.l2norm(x, dim=-1, eps=1e-6) for x in (q, k))
    state, out = torch.zeros(1, 8, 32, 48), torch.empty(150, 8, 48)
    native.scan_state(
        q[0] * 32**-0.5, k[0], v[0], decay[0], beta[0], state, spans_of([150]), out, is_delta=True
    )
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, after, rtol=1e-4, atol=1e-5)
