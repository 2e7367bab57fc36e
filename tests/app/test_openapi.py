"""/openapi.json describes the API, and requests generated from them never break it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from neo_desktop.app.application import create_app
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.engine.engine import Engine

from .conftest import RunningServer, running

schemathesis.checks.load_all_checks()
CHECKS = schemathesis.checks.CHECKS.get_by_names(["not_a_server_error"])


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with Engine.from_pretrained(device="cpu") as engine, running(engine) as shared:
        yield shared


APP = create_app(ModelHost())
DOCUMENT: dict[str, Any] = TestClient(APP, base_url="http://127.0.0.1").get("/openapi.json").json()
OPERATIONS = [
    (method.upper(), path, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
]


def test_it_describes_every_endpoint() -> None:
    assert {(method, path) for method, path, _ in OPERATIONS} == {
        ("POST", "/chat/completions"),
        ("POST", "/completions"),
        ("POST", "/responses"),
        ("GET", "/responses/{response_id}"),
        ("DELETE", "/responses/{response_id}"),
        ("POST", "/messages"),
        ("POST", "/messages/count_tokens"),
        ("POST", "/embeddings"),
        ("GET", "/models"),
        ("GET", "/models/{name}"),
    }
    for method, _, operation in OPERATIONS:
        assert operation["summary"]
        assert ("requestBody" in operation) == (method == "POST")


def test_its_examples_are_answered(server: RunningServer, http: httpx.Client) -> None:
    examples = [
        (method, path, example["value"])
        for method, path, operation in OPERATIONS
        if "requestBody" in operation
        for example in operation["requestBody"]["content"]["application/json"]["examples"].values()
    ]
    assert len(examples) == 6
    for method, path, example in examples:
        answer = http.request(method, f"/v1{path}", json=example)
        assert answer.status_code == 200, answer.text


def test_it_is_served(http: httpx.Client) -> None:
    assert http.get("/openapi.json").json() == DOCUMENT


def requests() -> st.SearchStrategy[Any]:
    schema = schemathesis.openapi.from_dict(DOCUMENT).exclude(path="/metrics")
    return st.one_of([found.ok().as_strategy() for found in schema.get_all_operations()])


@given(data=st.data())
@settings(derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
def test_requests_made_from_it_never_break_the_server(data: st.DataObject, server: RunningServer) -> None:
    """benchmarks/api_conformance.py tries thousands."""
    case = data.draw(st.deferred(requests))
    if isinstance(case.body, dict) and "tokens" not in case.path and "embeddings" not in case.path:
        case.body["max_output_tokens" if "responses" in case.path else "max_tokens"] = 2  # short answers
    case.call_and_validate(base_url=f"{server.url}/v1", checks=CHECKS, timeout=60)


DEEP = "[" * 100_000 + "]" * 100_000
QUESTION = {"role": "user", "content": "hello"}
HOSTILE: list[tuple[str, str | dict[str, Any]]] = [
    ("chat/completions", '{"messages": ' + DEEP + "}"),
    (
        "chat/completions",
        '{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": ' + DEEP + "}}",
    ),
    ("chat/completions", '{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}'),
    ("chat/completions", '{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}'),
    (
        "chat/completions",
        '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1' + "0" * 5000 + "}",
    ),
    ("chat/completions", '{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    ("chat/completions", {"messages": [QUESTION] * 100_000}),
    ("chat/completions", {"messages": [QUESTION], "seed": 2**64}),
    ("chat/completions", {"messages": [QUESTION], "logit_bias": {"9" * 1000: 1}}),
    ("chat/completions", {"messages": [QUESTION], "logit_bias": {"-1": 1}}),
    ("chat/completions", {"messages": [QUESTION], "structured_outputs": {"regex": "(a{1000}){1000}"}}),
    ("chat/completions", {"messages": [QUESTION], "grammar": ""}),
    ("completions", {"prompt": "x", "structured_outputs": {"grammar": ""}}),
    ("chat/completions", {"messages": [QUESTION], "grammar": "root ::= root"}),
    ("chat/completions", {"messages": [QUESTION], "grammar": "root ::= " + "(" * 5000}),
    ("chat/completions", {"messages": [QUESTION], "structured_outputs": {"json": {"$ref": "#"}}}),
    (
        "chat/completions",
        {"messages": [QUESTION], "structured_outputs": {"json": {"$ref": "http://localhost/x"}}},
    ),
    (
        "chat/completions",
        {
            "messages": [QUESTION],
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"$ref": "file:///etc/x"}}}
            ],
            "tool_choice": "required",
        },
    ),
    (
        "chat/completions",
        {"messages": [QUESTION], "tools": [{"type": "function", "function": {"name": "f"}}] * 10_000},
    ),
    ("chat/completions", {"messages": [QUESTION], "stop_token_ids": [10**15]}),
    ("chat/completions", {"messages": [QUESTION], "stop_token_ids": [-1]}),
    ("completions", {"prompt": [10**15]}),
    ("completions", {"prompt": [-1], "echo": True}),
    ("completions", {"prompt": "x", "n": 10**6}),
    ("completions", {"prompt": ["x"] * 100_000}),
    ("embeddings", {"input": []}),
    ("embeddings", {"input": [10**30]}),
    ("embeddings", {"input": "x", "dimensions": 5}),
    ("embeddings", {"input": "x" * 100_000}),
    ("responses", {"input": [QUESTION] * 100_000}),
    ("responses", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("messages", {"model": "neo-desktop-guide", "max_tokens": 0, "messages": [QUESTION]}),
    ("messages", {"model": "neo-desktop-guide", "max_tokens": 5, "messages": [QUESTION] * 100_000}),
]


@pytest.mark.sample(12)
@pytest.mark.parametrize(("path", "body"), HOSTILE, ids=[str(body)[:60] for _, body in HOSTILE])
def test_what_cannot_be_answered_is_refused_with_a_sentence(
    http: httpx.Client, path: str, body: str | dict[str, Any]
) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    answer = http.post(f"/v1/{path}", content=content)
    assert answer.status_code == 400, answer.text
    assert len(answer.json()["error"]["message"]) < 1000


def test_odd_names_do_no_harm(http: httpx.Client) -> None:
    name = "f\u0000\n\u202e\"'<tool_call>"
    tool = {"type": "function", "function": {"name": name, "parameters": {"properties": {name: {}}}}}
    body = {"messages": [QUESTION], "tools": [tool], "tool_choice": "required", "max_tokens": 30}
    assert http.post("/v1/chat/completions", json=body).status_code in (200, 400)
    assert http.get("/v1/responses/%00%0a..%2f").status_code == 404
    assert http.get("/v1/models/%ff").status_code == 404
