"""The whole path, from the openai client to a real model and back."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from checkpoints import save_checkpoint
from transformers import AutoTokenizer

import neo_desktop.models
from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.options import BUILTIN

from .conftest import RunningServer, eventually, is_idle, running

GREEDY: Any = {"temperature": 0.0, "max_tokens": 24}
QUESTIONS = ["hello", "What is a KV cache?", "x" * 150, "héllo 你好 👋", "1 + 1 =", "hello"]


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("tiny-llama"), "llama")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """Answers of the bare engine to the chats, with prompts rendered by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [
        tokenizer.apply_chat_template(chat(question), add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for question in QUESTIONS
    ]
    with Engine.from_pretrained(folder, device="cpu") as engine:
        return [output.text for output in engine.generate(prompts, SamplingParams(**GREEDY))]


@pytest.fixture(scope="module")
def server(folder: Path, expected: list[str]) -> Iterator[RunningServer]:
    # Each pool holds little more than the longest chat, so that requests wait, move and are preempted.
    cache = {"gpu_cache_tokens": 256, "cpu_cache_tokens": 256}
    with Engine.from_pretrained(folder, device="cpu", **cache) as engine, running(engine) as running_server:
        yield running_server


def ask(client: openai.OpenAI, question: str, stream: bool) -> str:
    messages: Any = chat(question)
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(model=model, messages=messages, stream=stream, **GREEDY)
    if not stream:
        return str(answer.choices[0].message.content)
    return "".join(part.choices[0].delta.content or "" for part in answer)


def test_clients_together_get_what_the_engine_gives_alone(server: RunningServer, expected: list[str]) -> None:
    with ThreadPoolExecutor(len(QUESTIONS) * 2) as clients:
        answers = [
            clients.submit(ask, server.client(), question, stream)
            for question in QUESTIONS
            for stream in (True, False)
        ]
    texts = [answer.result() for answer in answers]
    assert texts[::2] == expected
    assert texts[1::2] == expected
    eventually(lambda: is_idle(server.service))


def test_completions_take_the_raw_prompt(server: RunningServer, folder: Path) -> None:
    token_ids = AutoTokenizer.from_pretrained(folder)("Once upon a time").input_ids
    client = server.client()
    model = client.models.list().data[0].id
    fields: Any = {"model": model, "temperature": 0.0, "logprobs": 3}
    by_text = client.completions.create(prompt="Once upon a time", **fields)
    by_ids = client.completions.create(prompt=token_ids, **fields)
    assert by_text.choices == by_ids.choices
    assert by_text.usage is not None
    assert by_text.usage.prompt_tokens == len(token_ids)
    logprobs = by_text.choices[0].logprobs
    assert logprobs is not None
    assert all(value <= 0 for value in logprobs.token_logprobs or ())


def test_the_built_in_model_answers() -> None:
    if not (Path(neo_desktop.models.__file__).parent / BUILTIN / "config.json").exists():
        pytest.skip("the built-in model is not in this checkout")
    with Engine.from_pretrained(BUILTIN, device="cpu") as engine, running(engine) as server:
        assert ask(server.client(), "Hello!", stream=True).strip()
