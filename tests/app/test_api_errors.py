"""Every error of the API has OpenAI's shape and names the field."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import httpx
import openai
import pytest

from .conftest import RunningServer, eventually, running
from .fake_engine import MODEL, FakeExecutor, make_engine
from .test_api import PROMPT, ask, letters


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(make_engine(FakeExecutor())) as shared:
        yield shared


@pytest.fixture
def executor(server: RunningServer) -> FakeExecutor:
    return cast("FakeExecutor", server.engine.executor)


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 101.0}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1.5}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"stop": 5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"seed": 2**70}, "seed"),
    ({"presence_penalty": 3.0}, "presence_penalty"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"extra_body": {"top_k": -2}}, "top_k"),
    ({"extra_body": {"stop_token_ids": ["x"]}}, "stop_token_ids[0]"),
    ({"extra_body": {"beam_width": 4}}, "beam_width"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs.regex"),
    ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["a"]}}}, "structured_outputs.choice"),
    ({"extra_body": {"structured_outputs": {"json": "no JSON"}}}, "structured_outputs.json"),
    ({"extra_body": {"grammar": "root ::= ["}}, "grammar"),
    ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
    ({"extra_body": {"n_predict": 5}}, "n_predict"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"257": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"extra_body": {"stop_token_ids": [10**15]}}, "stop_token_ids"),
    ({"store": True}, "store"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].image_url",
    ),
    ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=[param for _, param in BAD_FIELDS])
def test_a_bad_field_is_named(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(client, **fields)
    assert refusal.value.param == (param or None)
    assert refusal.value.type == "invalid_request_error"
    assert param.partition("[")[0] in refusal.value.body["message"]


@pytest.mark.parametrize(
    "fields",
    [{"echo": True, "logprobs": 1}, {"best_of": 3}, {"suffix": "x"}, {"logprobs": 30}, {"prompt": []},
     {"prompt": [1, "x"]}, {"prompt": ""}, {"prompt": [257]}, {"prompt": [[]]}],
    ids=str,
)  # fmt: skip
def test_a_bad_field_of_completions_is_named(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(**({"model": MODEL, "prompt": "x"} | fields))
    assert refusal.value.param == next(iter(fields))


@pytest.mark.parametrize(
    "too_long", [{"messages": [{"role": "user", "content": "x" * 600}]}, {"max_tokens": 600}]
)
def test_what_does_not_fit_the_context_is_refused(client: openai.OpenAI, too_long: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="shorten the prompt") as refusal:
        ask(client, **too_long)
    assert refusal.value.code == "context_length_exceeded"


def test_a_chat_that_the_template_refuses(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="that I will not read") as refusal:
        ask(client, messages=[{"role": "user", "content": "refuse"}])
    assert refusal.value.param == "messages"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    for call in (lambda: ask(client, model="gpt-x"), lambda: client.models.retrieve("org/gpt-x")):
        with pytest.raises(openai.NotFoundError, match=f"'{MODEL}' is") as refusal:
            call()
        assert refusal.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/chat/completions", b"{not json", 400),
        ("POST", "/v1/chat/completions", b"\xff\xfe", 400),
        ("POST", "/v1/chat/completions", b"", 400),
        ("POST", "/v1/chat/completions", b"[]", 400),
        ("POST", "/v1/chat/completions", b'{"messages": "hello"}', 400),
        ("POST", "/v1/completions", b'{"prompt": "\\ud800"}', 400),
        ("POST", "/v1/completions", b"[" * 100_000, 400),
        ("POST", "/v1/completions", b"x" * (32 * 2**20 + 1), 413),
        ("GET", "/v1/chat/completions", b"", 405),
        ("POST", "/v1/models", b"", 405),
        ("POST", "/v1/nothing", b"{}", 404),
        ("GET", "/v1", b"", 404),
        ("GET", "/v1/../v1/nothing", b"", 404),
    ],
    ids=lambda value: value[:24] if isinstance(value, bytes) else None,
)
def test_every_error_has_openais_shape(
    http: httpx.Client, method: str, path: str, body: bytes, status: int
) -> None:
    answer = http.request(method, path, content=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]


def test_a_full_queue_is_503() -> None:
    executor = FakeExecutor()
    with running(make_engine(executor), max_queued_requests=1) as server:
        executor.open.clear()
        with (
            httpx.Client(base_url=server.url, trust_env=False, timeout=30) as http,
            ThreadPoolExecutor() as in_background,
        ):
            first = in_background.submit(
                server.client().completions.create, model=MODEL, prompt="x", max_tokens=2
            )
            eventually(executor.begun.is_set)
            answer = http.post("/v1/completions", json={"prompt": "abc"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "queue_full"
            executor.open.set()
            assert first.result(30).choices[0].text == letters("x", 2)
            assert http.post("/v1/completions", json={"prompt": "abc"}).status_code == 200


def test_an_engine_failure_is_500_or_an_event(client: openai.OpenAI, executor: FakeExecutor) -> None:
    executor.error = RuntimeError("no memory left")
    with pytest.raises(openai.InternalServerError, match="no memory left") as failure:
        ask(client)
    assert failure.value.status_code == 500
    with pytest.raises(openai.APIError, match="no memory left"):
        list(ask(client, stream=True))
    executor.error = None
    assert ask(client).choices[0].message.content == letters(PROMPT, 5)


def test_a_defect_is_500_without_internals(
    http: httpx.Client, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.engine.tokenizer, "encode", lambda *_: {}["secret"])
    answer = http.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["code"] == "internal_error"
