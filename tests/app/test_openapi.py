"""/openapi.json and /docs tell what the API does, and requests made from them never break it."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from starlette.routing import Route

from neo_desktop.app.api import create_api
from neo_desktop.app.api.openapi import ROUTES, document
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.engine.engine import Engine

from .conftest import RunningServer, running

schemathesis.checks.load_all_checks()
CHECKS = schemathesis.checks.CHECKS.get_by_names(["not_a_server_error", "response_schema_conformance"])


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with Engine.from_pretrained(device="cpu") as engine, running(engine) as shared:
        yield shared


def test_it_describes_exactly_the_routes_that_there_are() -> None:
    described = {(route.method.upper(), route.path.replace("{name}", "{name:path}")) for route in ROUTES}
    there_are = {
        (method, f"/v1{route.path}")
        for route in create_api(ModelHost()).routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    hidden = {("POST", "/v1/responses/{name}")}  # answers 404
    assert there_are - hidden == {pair for pair in described if pair[1].startswith("/v1")}


def test_its_examples_are_answered(server: RunningServer, http: httpx.Client) -> None:
    for route in ROUTES:
        for _, example in route.examples:
            body = example | ({"model": server.service.model_name} if "model" in example else {})
            answer = http.request(route.method, route.path, json=body)
            assert answer.status_code == 200, answer.text


def test_the_documents_are_served_and_fetch_nothing_else(http: httpx.Client) -> None:
    assert http.get("/openapi.json").json() == json.loads(document())
    page = http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert all(f"{route.path}</code></h2>" in page.text for route in ROUTES)
    assert not re.search(r"<script|src=|https?://|<link", page.text)


SCHEMA = schemathesis.openapi.from_dict(json.loads(document())).exclude(path="/metrics")


@SCHEMA.parametrize()
@hypothesis.settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
def test_requests_made_from_it_never_break_the_server(case: Any, server: RunningServer) -> None:
    if isinstance(case.body, dict) and "tokens" not in case.path and "embeddings" not in case.path:
        case.body["max_output_tokens" if "responses" in case.path else "max_tokens"] = 2  # short answers
    case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=60)


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
    ("chat/completions", {"messages": [QUESTION], "guided_regex": "(a{1000}){1000}"}),
    ("chat/completions", {"messages": [QUESTION], "grammar": ""}),
    ("completions", {"prompt": "x", "guided_grammar": ""}),
    ("chat/completions", {"messages": [QUESTION], "grammar": "root ::= root"}),
    ("chat/completions", {"messages": [QUESTION], "grammar": "root ::= " + "(" * 5000}),
    ("chat/completions", {"messages": [QUESTION], "guided_json": {"$ref": "#"}}),
    ("chat/completions", {"messages": [QUESTION], "guided_json": {"$ref": "http://localhost/x"}}),
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
