"""The API as the openai client sees it."""

import json
from collections.abc import Iterator
from typing import Any, cast

import httpx
import openai
import pytest

from neo_desktop.models.config import GenerationDefaults

from .conftest import RunningServer, running
from .fake_engine import CONTEXT_TOKENS, MODEL, FakeExecutor, make_engine

QUESTION: Any = [{"role": "user", "content": "hello"}]
PROMPT = "<user>hello<assistant>"  # QUESTION after the chat template; one token per byte


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(make_engine(FakeExecutor())) as shared:
        yield shared


@pytest.fixture
def executor(server: RunningServer) -> FakeExecutor:
    return cast("FakeExecutor", server.engine.executor)


def letters(prompt: str, count: int, shift: int = 0) -> str:
    return "".join(chr(ord("a") + (len(prompt) + i + shift) % 26) for i in range(count))


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **({"model": MODEL, "messages": QUESTION, "max_tokens": 5} | fields)
    )


def test_models_tell_their_context_length(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "neo-desktop")
    assert model.model_extra == {"root": MODEL, "max_model_len": CONTEXT_TOKENS}
    assert client.models.retrieve(MODEL) == model


def test_health_and_stats() -> None:
    with (
        running(make_engine(FakeExecutor())) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        assert http.get("/health").json() == {"status": "ok", "model": MODEL, "backend": "neo"}
        ask(server.client())
        stats = http.get("/stats").json()
    assert (stats["num_prompt_tokens"], stats["num_output_tokens"]) == (len(PROMPT), 5)
    assert stats["pools"]["device"]["num_used_blocks"] == 0


def test_chat(client: openai.OpenAI) -> None:
    answer = ask(client)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", letters(PROMPT, 5))
    assert choice.finish_reason == "length"
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == len(PROMPT) + 5


def test_the_template_gets_all_messages(client: openai.OpenAI, executor: FakeExecutor) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    first = ask(client).choices[0].message.model_dump()  # with all empty fields, as from real clients
    messages = [
        {"role": "developer", "content": "be kind"},
        *QUESTION,
        first,
        {"role": "user", "content": parts},
    ]
    ask(client, messages=messages)
    expected = f"<system>be kind<user>hello<assistant>{letters(PROMPT, 5)}<user>one\ntwo<assistant>"
    assert bytes(list(executor.prompts.values())[-1][: len(expected)]).decode() == expected


def test_special_tokens_are_added_to_raw_prompts_only(
    client: openai.OpenAI, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + list(text.encode())

    monkeypatch.setattr(server.engine.tokenizer, "encode", encode)
    assert ask(client).usage.prompt_tokens == len(PROMPT)  # the template writes the BOS token itself
    answer = client.completions.create(model=MODEL, prompt=PROMPT)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 1 + len(PROMPT)


def test_chat_stream(client: openai.OpenAI) -> None:
    first, *parts, last = ask(client, stream=True)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(part.choices[0].delta.content for part in parts) == letters(PROMPT, 5)
    assert [part.choices[0].finish_reason for part in (first, *parts)] == [None] * 6
    assert (last.choices[0].finish_reason, last.choices[0].delta.content) == ("length", None)
    assert len({chunk.id for chunk in (first, *parts, last)}) == 1
    assert first.object == "chat.completion.chunk"


def test_a_stream_ends_with_usage_if_asked_for(client: openai.OpenAI) -> None:
    *parts, last = ask(client, stream=True, n=2, stream_options={"include_usage": True})
    assert all(part.usage is None and part.choices for part in parts)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(PROMPT), 10)


def test_stream_and_whole_answer_are_the_same(client: openai.OpenAI) -> None:
    fields = {"n": 3, "seed": 5, "stop": ["l", "xyz"], "max_tokens": 30, "logprobs": True, "top_logprobs": 2}
    whole = {choice.index: choice for choice in ask(client, **fields).choices}
    texts, logprobs, ends = {0: "", 1: "", 2: ""}, {0: [], 1: [], 2: []}, {}
    for part in ask(client, stream=True, **fields):
        (choice,) = part.choices
        texts[choice.index] += choice.delta.content or ""
        logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
        ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    for index, choice in whole.items():
        assert texts[index] == choice.message.content
        assert [one.model_dump() for one in logprobs[index]] == [
            one.model_dump() for one in choice.logprobs.content
        ]
        assert ends[index] == choice.finish_reason == "stop"
        assert "l" not in texts[index]


def test_seed_and_n(client: openai.OpenAI) -> None:
    answers = [ask(client, seed=seed, n=2).choices for seed in (1, 1, 2)]
    texts = [[choice.message.content for choice in choices] for choices in answers]
    assert texts[0] == texts[1] == [letters(PROMPT, 5, 1), letters(PROMPT, 5, 2)]
    assert texts[2] == [letters(PROMPT, 5, 2), letters(PROMPT, 5, 3)]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    (choice,) = ask(client, logprobs=True, top_logprobs=3, max_tokens=2).choices
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    token = choice.logprobs.content[0]
    assert bytes(token.bytes).decode() == token.token
    assert [top.logprob for top in token.top_logprobs] == [-0.5, -1.5, -2.5]
    assert ask(client).choices[0].logprobs is None
    assert ask(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [("abc", [3]), (["abc", "de"], [3, 2]), ([1, 2, 3, 4], [4]), ([[1], [2, 3]], [1, 2])],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_completions(client: openai.OpenAI, prompt: Any, lengths: list[int]) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, n=2, seed=0)
    expected = [letters("x" * length, 16, shift) for length in lengths for shift in (0, 1)]
    assert [choice.text for choice in answer.choices] == expected  # OpenAI's default is 16 tokens
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(lengths)
    assert answer.usage.completion_tokens == 16 * len(expected)


def test_completion_stream_with_logprobs(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "prompt": ["abc", "d"], "max_tokens": 3, "logprobs": 2}
    whole = client.completions.create(**fields)
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.tokens == list(whole.choices[0].text)
    assert whole.choices[0].logprobs.text_offset == [0, 1, 2]
    streamed: dict[int, list[Any]] = {0: [], 1: []}
    for part in client.completions.create(stream=True, **fields):
        (choice,) = part.choices
        streamed[choice.index] += (
            zip(*choice.logprobs.model_dump().values(), strict=True) if choice.logprobs else []
        )
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert streamed[choice.index] == list(zip(*choice.logprobs.model_dump().values(), strict=True))


def test_stop_token_ids_and_ignore_eos_and_top_k(client: openai.OpenAI, executor: FakeExecutor) -> None:
    stop_at = ord(letters(PROMPT, 3)[2])
    extra = {
        "stop_token_ids": [stop_at],
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "ignore_eos": True,
    }
    (choice,) = ask(client, extra_body=extra).choices
    assert (choice.message.content, choice.finish_reason) == (letters(PROMPT, 2), "stop")
    params = executor.seen[-1].params
    assert (params.top_k, params.min_p, params.repetition_penalty, params.ignore_eos) == (7, 0.1, 1.5, True)
    ask(client, extra_body={"top_k": -1})
    assert executor.seen[-1].params.top_k == 0


def test_unset_fields_follow_the_models_recommendation() -> None:
    executor = FakeExecutor()
    recommended = GenerationDefaults(do_sample=True, temperature=0.6, top_k=20, top_p=0.95)
    with running(make_engine(executor, generation=recommended)) as server:
        ask(server.client())
        params = executor.seen[-1].params
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 20, 0.95, 0.0)
        ask(server.client(), temperature=0.0, top_p=0.5)
        params = executor.seen[-1].params
        assert (params.temperature, params.top_k, params.top_p) == (0.0, 20, 0.5)


def test_a_model_that_does_not_sample_is_greedy_unless_asked() -> None:
    executor = FakeExecutor()
    with running(
        make_engine(executor, generation=GenerationDefaults(do_sample=False, temperature=0.6))
    ) as server:
        ask(server.client())
        assert executor.seen[-1].params.temperature == 0.0
        ask(server.client(), temperature=0.9)
        assert executor.seen[-1].params.temperature == 0.9


def test_without_recommendation_the_defaults_are_openais(
    client: openai.OpenAI, executor: FakeExecutor
) -> None:
    ask(client)
    params = executor.seen[-1].params
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)


def test_the_model_may_be_left_out(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
    assert answer.json()["choices"][0]["text"] == letters("abc", 2)


def test_a_model_without_template_still_completes() -> None:
    with running(make_engine(FakeExecutor(), template=None)) as server:
        with pytest.raises(openai.BadRequestError, match="/v1/completions"):
            ask(server.client())
        assert server.client().completions.create(model=MODEL, prompt="x").choices[0].text


def test_events_are_one_line_of_json_each_and_end_with_done(http: httpx.Client) -> None:
    def lines() -> Iterator[str]:
        body = {"messages": QUESTION, "stream": True, "max_tokens": 3}
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            yield from answer.iter_lines()

    *events, done, end = lines()
    assert (done, end) == ("data: [DONE]", "")
    for event, blank in zip(events[::2], events[1::2], strict=True):
        assert json.loads(event.removeprefix("data: "))["choices"]
        assert blank == ""
