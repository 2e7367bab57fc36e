"""Scans of prompts in chunks equal exact recurrences; models with them give the tokens of transformers."""

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from checkpoints import transformers_greedy
from cost_models import machine
from hypothesis import example, given
from numpy.typing import NDArray
from recurrent_models import RECURRENT
from seeds import few_examples, first
from torch.nn.functional import normalize
from traced_models import save
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from neo_desktop.engine.engine import Engine
from neo_desktop.engine.kernels.in_triton.chunked_scan import scan_chunks
from neo_desktop.engine.kernels.in_triton.recurrent import LEAST_TOKENS, scan_state
from neo_desktop.engine.loading import load
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.setup import take_memory
from neo_desktop.models import native_operators
from neo_desktop.models.recurrent import Spans
from neo_desktop.models.traced import stages
from neo_desktop.models.traced.places import NotRowsError

DECAYS = (0.0, -1e-6, -0.1, -1.0, -90.0, -1e4, -np.inf)
BETAS = (0.0, 1e-3, 0.5, 1.0, 2.0)  # above 1: states with negative eigenvalues


def spans_of(lengths: list[int], device: torch.device) -> Spans:
    """Return spans from slot i to slot i + n; the first begins with zeros."""
    ends, count = np.cumsum(lengths), len(lengths)
    sources = np.where(np.arange(count) == 0, -1, np.arange(count))
    table = np.stack([ends - lengths, ends, sources, np.arange(count) + count], 1)
    return Spans(torch.from_numpy(table).to(device, torch.int32), max(lengths))


def exact(
    q: Any, k: Any, v: Any, decay: Any, beta: Any, state: NDArray[np.float64], *, is_delta: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute a head's results and its last state token by token, in float64."""
    results = np.zeros(v.shape)
    for token in range(len(v)):
        state = state * np.exp(decay[token])
        update = beta[token] * (v[token] - (k[token] @ state if is_delta else 0.0))
        state = state + np.outer(k[token], update)
        results[token] = q[token] @ state
    return results, state


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_delta", [True, False])
@pytest.mark.parametrize("sizes", [(24, 3), (80, 20)], ids=str)
@few_examples
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=3), seed=st.integers(0, 2**32))
@example(lengths=[16, 17, 15], seed=0)
@example(lengths=[33, 32, 1], seed=1)
def test_chunks_are_exact_for_any_gates(
    lengths: list[int], seed: int, sizes: tuple[int, int], is_delta: bool, device: torch.device
) -> None:
    """Gates are drawn from extremes, keys repeat, and requests of any lengths share a launch."""
    random, rows, heads = np.random.default_rng(seed), sum(lengths), 2
    q, k = random.standard_normal((2, rows, 1, sizes[0]))
    k[random.random(rows) < 0.3] = k[0]
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, decay = random.standard_normal((rows, heads, sizes[1])), random.choice(DECAYS, (rows, heads))
    decay[random.random(rows) < 0.5] = random.choice(DECAYS[:4])
    beta = random.choice(BETAS, (rows, heads))
    state = random.standard_normal((2 * len(lengths) + 1, heads, *sizes))
    arrays = [x.astype(np.float32) for x in (q, k, v, decay, beta, state)]
    given = [torch.tensor(x, device=device) for x in arrays]
    out, spans = torch.zeros_like(given[2]), spans_of(lengths, device)
    scan_chunks(*given, spans=spans, out=out, is_delta=is_delta)
    q, k, v, decay, beta, state = (x.astype(np.float64) for x in arrays)
    for begin, end, source, target in spans.table.tolist():
        for head in range(heads):
            before = state[source, head] if source >= 0 else np.zeros(sizes)
            tokens = slice(begin, end)
            parts = q[tokens, 0], k[tokens, 0], v[tokens, head], decay[tokens, head], beta[tokens, head]
            results, after = exact(*parts, before, is_delta=is_delta)
            np.testing.assert_allclose(out[tokens, head].cpu(), results, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(given[5][target, head].cpu(), after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_delta", [True, False])
def test_chunks_give_the_numbers_of_transformers(is_delta: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    tokens, key_heads, heads, sizes = 70, 2, 4, (24, 16)
    q, k = (normalize(torch.randn(1, tokens, key_heads, sizes[0]), dim=-1) for _ in "qk")
    v, beta = torch.randn(1, tokens, heads, sizes[1]), torch.rand(1, tokens, heads)
    rates = -torch.rand(heads)
    if is_delta:
        decay = beta * rates
        expected, _ = torch_chunk_gated_delta_rule(q, k, v, decay, beta)
        q = q * sizes[0] ** -0.5
    else:
        decay = beta * rates
        expected = mamba2_chunk_scan(v, beta, rates, k, q, chunk_size=16)
    given = [x[0].to(device) for x in (q, k, v, decay, beta)]
    state, out = torch.zeros(3, heads, *sizes, device=device), torch.zeros_like(given[2])
    everything: Any = (*given, state, spans_of([tokens], device), out)
    scan_state(*everything, is_delta=is_delta)
    torch.testing.assert_close(out.cpu(), expected[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", first(["qwen3.5", "granite-4-h"]))
def test_models_give_the_tokens_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scans are those of a GPU; prompts come in chunks of an iteration, leave checkpoints and come again."""
    launches: list[int] = []

    def scan(*given: Any, is_delta: bool) -> None:
        launches.append(given[6].longest)
        scan_state(*given, is_delta=is_delta)

    def no_program(*_: object) -> None:
        raise NotRowsError("scans are Triton's here")

    monkeypatch.setattr(native_operators, "scan_state", scan)
    monkeypatch.setattr(stages, "lowered", no_program)
    folder = save(tmp_path / family, *RECURRENT[family])
    generator = torch.Generator().manual_seed(1)
    first_prompt = torch.randint(3, 300, (45,), generator=generator).tolist()
    prompts = [first_prompt, [*first_prompt[:33], 7]]
    greedy = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    expected = [transformers_greedy(folder, prompt, 2) for prompt in prompts]
    options = EngineOptions(
        model=folder, device="cpu", gpu_cache_tokens=512, max_batch_tokens=42, max_batch_requests=4
    )
    parts = take_memory(load(options), options)
    with Engine.from_parts(parts, "gpu-only", cost_model=machine(cpu_token_ms=1e-6)) as engine:
        for count in (2, 1):
            found = engine.generate(prompts[:count], greedy)
            assert [list(each.token_ids) for each in found] == expected[:count]
        assert found[0].num_cached_tokens > 0
    assert max(launches) >= LEAST_TOKENS
