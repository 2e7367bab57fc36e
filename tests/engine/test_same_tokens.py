"""An answer of quantised weights on a CPU has the same bits in any batch, chunk, cache and policy."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from cost_models import machine
from gguf_files import write_gguf
from hypothesis import given
from seeds import few_examples
from transformers import LlamaConfig, LlamaForCausalLM

from neo_desktop import Engine, SamplingParams, native
from neo_desktop.engine.generate import Completion
from neo_desktop.engine.loading import load
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.setup import take_memory

Answer = tuple[list[int], list[float]]
VOCABULARY, MOST_TOKENS = 384, 230
loaded_once = cache(load)
POLICIES = ("gpu-only", "fastdecode", "neo", "apex", "pie", "auto")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("quantised") / "small.gguf"
    return write_gguf(path, LlamaForCausalLM(config), type_name="Q4_1")


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = native.default_num_threads()
    yield
    native.set_default_num_threads(before)


def prompts() -> st.SearchStrategy[list[list[int]]]:
    """Draw prompts that share prefixes of one text, most of their KV in some cases."""
    text = [(37 * i * i + 11 * i) % VOCABULARY for i in range(MOST_TOKENS)]
    tail = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20)
    one = st.builds(lambda shared, own: text[:shared] + own, st.integers(0, MOST_TOKENS - 20), tail)
    return st.lists(one, min_size=1, max_size=4)


def params(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=20, temperature=0.8 * (seed % 2), seed=seed, ignore_eos=True, logprobs=0)


def answer(found: Completion) -> Answer:
    return list(found.token_ids), [token.logprob.logprob for token in found.tokens if token.logprob]


@given(
    batch=prompts(),
    policy=st.sampled_from(POLICIES),
    max_batch_tokens=st.integers(4, 40) | st.integers(41, 512),
    cache_tokens=st.sampled_from([272, 384, 1024]),
    num_threads=st.integers(1, 3),
)
@few_examples
def test_an_answer_has_the_same_bits_cold_warm_chunked_preempted_and_under_every_policy(
    model: Path,
    batch: list[list[int]],
    policy: str,
    max_batch_tokens: int,
    cache_tokens: int,
    num_threads: int,
) -> None:
    each = [params(i) for i in range(len(batch))]
    cost_model = machine(num_layers=2)
    loaded = loaded_once(EngineOptions(model=model, device="cpu"))
    parts = take_memory(loaded, EngineOptions(device="cpu", policy="gpu-only"))
    with Engine.from_parts(parts, "gpu-only", cost_model=cost_model) as engine:
        alone = [engine.generate([prompt], one)[0] for prompt, one in zip(batch, each, strict=True)]
    of_cpu = {} if policy == "gpu-only" else {"cpu_cache_tokens": cache_tokens}
    of_gpu = {} if policy == "fastdecode" else {"gpu_cache_tokens": cache_tokens}
    options = EngineOptions(
        device="cpu",
        policy=policy,
        max_batch_tokens=max_batch_tokens,
        max_batch_requests=4,
        **of_cpu,
        **of_gpu,
    )
    with Engine.from_parts(take_memory(loaded, options), policy, cost_model=cost_model) as engine:
        native.set_default_num_threads(num_threads)
        for _ in range(2):
            together = engine.generate(batch, each)
            assert list(map(answer, together)) == list(map(answer, alone))
