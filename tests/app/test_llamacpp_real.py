"""llama.cpp behind the same service writes what it writes alone."""

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf
from real_model import smollm2
from transformers import GemmaConfig, GemmaForCausalLM

from neo_desktop.app.llamacpp.engine import LlamaCppEngine
from neo_desktop.app.llamacpp.recipe import LlamaCppRecipe
from neo_desktop.app.llamacpp.tokenizer import LlamaCppTokenizer
from neo_desktop.app.shelf.catalogue import Catalogue
from neo_desktop.app.shelf.model_loader import ModelLoader
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.checkpoint import open_checkpoint

from .conftest import running

CPU = EngineOptions(device="cpu")


needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)


def nothing(share: float, what: str) -> None:
    pass


def answer_of(engine: LlamaCppEngine, prompt: Any, **params: Any) -> tuple[str, list[int]]:
    engine.add("alone", engine.input_processor.prepare(prompt, SamplingParams(**params)))
    outputs = []
    while engine.has_work:
        engine.collect()
        outputs += engine.take_outputs()
    assert outputs[-1].error is None
    return "".join(each.text for each in outputs), [
        token.token_id for each in outputs for token in each.tokens
    ]


@needs_llama_cpp
def test_a_real_model_writes_what_llama_cpp_writes() -> None:
    Llama = pytest.importorskip("llama_cpp").Llama  # noqa: N806
    file = smollm2()
    engine = LlamaCppRecipe("smollm2", file, EngineOptions(device="cpu", cpu_cache_tokens=2048))(nothing)
    own = Llama(str(file), n_ctx=2048, flash_attn=True, verbose=False)
    for prompt in ("The capital of France is", "def fibonacci(n):", "Die Hauptstadt von"):
        text, _ = answer_of(engine, prompt, temperature=0, max_tokens=24)
        told = own.create_completion(
            engine.input_processor.tokenizer.encode(prompt), max_tokens=24, temperature=0, repeat_penalty=1.0
        )
        assert text == told["choices"][0]["text"]
        sampled = answer_of(engine, prompt, seed=7, max_tokens=12)
        assert answer_of(engine, prompt, seed=7, max_tokens=12) == sampled
    engine.close()


@needs_llama_cpp
def test_a_real_model_is_served_by_llama_cpp_where_that_is_asked_for() -> None:
    file = smollm2()
    options = EngineOptions(device="cpu", cpu_cache_tokens=2048)
    loader = ModelLoader(Catalogue([file.parent]), options, backend="llamacpp")
    service = loader(file.stem, nothing)
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    with running(service._link) as server:
        ask = server.client().completions.create
        whole = ask(model=file.stem, prompt=prompt, max_tokens=24, temperature=0)
        assert "Paris" in whole.choices[0].text
        pieces = ask(model=file.stem, prompt=prompt, max_tokens=24, temperature=0, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.choices[0].text
    service.close()


@needs_llama_cpp
def test_its_tokenizer_is_that_of_the_engine() -> None:
    file = smollm2()
    theirs, ours = LlamaCppTokenizer(file), open_checkpoint(file).tokenizer()
    for text in ("Hello, Wörld 👋🏽 日本語", "<|im_start|>user\nx<|im_end|>", "  a  b\n\n1234 don't", ""):
        token_ids = ours.encode(text)
        assert theirs.encode(text) == token_ids
        for skip in (True, False):
            assert theirs.decode(token_ids, skip) == ours.decode(token_ids, skip)
    tokens = range(ours.vocab_size)
    assert [theirs.token_bytes(each) for each in tokens] == [ours.token_bytes(each) for each in tokens]
    assert [theirs.text_alone(each) for each in tokens] == [ours.text_alone(each) for each in tokens]
    assert theirs.chat_template == ours.chat_template
    with pytest.raises(ValueError, match="surrogate"):
        theirs.encode("\ud800")


@needs_llama_cpp
def test_a_model_that_the_engine_has_not_is_answered(tmp_path: Path) -> None:
    config = GemmaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
    )
    torch.manual_seed(1)
    model = GemmaForCausalLM(config)
    for name, weight in model.named_parameters():  # llama.cpp stores norms as their factors
        torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
    write_gguf(tmp_path / "tiny-gemma.gguf", model, architecture="gemma")
    file = tmp_path / "tiny-gemma.gguf"
    engine = LlamaCppRecipe("tiny-gemma", file, CPU)(nothing)
    text, token_ids = answer_of(engine, "abc", temperature=0, max_tokens=8)
    engine.close()
    own = pytest.importorskip("llama_cpp").Llama(str(file), n_ctx=256, flash_attn=True, verbose=False)
    told = own.generate(engine.input_processor.tokenizer.encode("abc"), temp=0, repeat_penalty=1.0)
    assert token_ids == list(itertools.islice(told, 8))
    assert len(set(token_ids)) > 1
    loader = ModelLoader(Catalogue([tmp_path]), CPU)
    service = loader("tiny-gemma", nothing)
    with running(service._link) as server:
        answer = server.client().completions.create(
            model="tiny-gemma", prompt="abc", max_tokens=8, temperature=0
        )
        assert (answer.choices[0].text, answer.usage.completion_tokens) == (text, 8)
        assert service.is_process
    service.close()
