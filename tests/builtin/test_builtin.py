"""The built-in model: the shipped files, the held-out questions, and its answers to them."""

import json
import math
import struct
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from research.builtin.corpus import chats, normalised, questions
from research.builtin.evaluate import Case, load_cases

ROOT = Path(__file__).resolve().parents[2]
BUILTIN = ROOT / "models" / "builtin"
HELD_OUT = Path(__file__).with_name("heldout.json")
DEVELOPMENT = Path(__file__).with_name("development.json")
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "README.md",
)


def read_json(name: str) -> dict[str, Any]:
    return json.loads((BUILTIN / name).read_text(encoding="utf-8"))


def safetensors_header() -> dict[str, Any]:
    """Return name -> {dtype, shape} by the published layout: a length of 8 bytes, then JSON."""
    with (BUILTIN / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


@pytest.mark.parametrize("name", FILES)
def test_checkpoint_is_complete(name: str) -> None:
    assert (BUILTIN / name).stat().st_size > 0


def test_weights_are_fp16_and_small() -> None:
    assert (BUILTIN / "model.safetensors").stat().st_size < 24_000_000
    header = safetensors_header()
    assert {entry["dtype"] for entry in header.values()} == {"F16"}
    assert 4e6 <= sum(math.prod(entry["shape"]) for entry in header.values()) <= 12e6


def test_shape_is_a_llama_with_grouped_queries() -> None:
    config = read_json("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_hidden_layers"] >= 4
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["head_dim"] == 64
    header = safetensors_header()
    assert header["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]
    key_rows = config["num_key_value_heads"] * config["head_dim"]
    assert header["model.layers.0.self_attn.k_proj.weight"]["shape"] == [key_rows, config["hidden_size"]]


@pytest.mark.sample(0)
def test_questions_are_not_in_the_corpus() -> None:
    seen = {
        normalised(message.content)
        for conversation in chain(chats(), questions())
        for message in conversation
        if message.role == "user"
    }
    asked = [case.messages[-1]["content"] for path in (HELD_OUT, DEVELOPMENT) for case in load_cases(path)]
    assert [question for question in asked if normalised(question) in seen] == []


@pytest.mark.sample(0)
def test_held_out_questions_are_answered() -> None:
    """At least 90 % of the engine's greedy answers are right, all in one batch (the card has the figure)."""
    from neo_desktop import Engine, SamplingParams  # noqa: PLC0415 - needs the built package
    from neo_desktop.app.templates.chat_template import ChatTemplate  # noqa: PLC0415

    cases = load_cases(HELD_OUT)
    settings = read_json("tokenizer_config.json")
    template = ChatTemplate(settings["chat_template"], {"bos_token": settings["bos_token"]})
    tokenizer = Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
    prompts = [tokenizer.encode(template.render(case.messages)).ids for case in cases]
    with Engine.from_pretrained("builtin", device="cpu") as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=120, temperature=0.0))
    wrong = [
        describe(case, output.text)
        for case, output in zip(cases, outputs, strict=True)
        if not case.accepts(output.text)
    ]
    assert len(wrong) <= 0.1 * len(cases), "\n".join(wrong)


def describe(case: Case, answer: str) -> str:
    return f"{case.messages[-1]['content']!r} -> {answer!r}"
