"""Requests that HTTP clients may send: bodies, targets, methods, model names."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from .conftest import RunningServer, running
from .fake_engine import MODEL, FakeExecutor, make_engine

PATH = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "one", "max_tokens": 3}
PLAIN = json.dumps(BODY).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(make_engine(FakeExecutor()), model_aliases=["gpt-*", "mine"]) as shared:
        yield shared


@pytest.mark.parametrize(
    ("body", "headers", "status", "said"),
    [
        (PLAIN, {"content-type": "text/plain"}, 200, ""),
        (b"\xef\xbb\xbf" + PLAIN, {}, 200, ""),
        (PLAIN, {"content-encoding": "identity"}, 200, ""),
        (PLAIN, {"content-encoding": "gzip"}, 415, "send it plain"),
        (PLAIN, {"content-type": "application/json; charset=utf-16"}, 415, "UTF-8"),
        (b"--x", {"content-type": "multipart/form-data; boundary=x"}, 415, "application/json"),
        (b'{"prompt": "a", "temperature": NaN}', {}, 400, "not valid JSON"),
        (b'{"prompt": "\\ud800"}', {}, 400, "not valid JSON"),
        (b'{"prompt": "\xff"}', {}, 400, "not valid JSON"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", {}, 400, ""),
        (b'{"json_schema": ' + b"[" * 1000 + b"]" * 1000 + b"}", {}, 400, ""),
        (b"[1]", {}, 400, "the body must be an object"),
        (b"null", {}, 400, "the body must be an object"),
    ],
    ids=range(13),
)
def test_bodies(http: httpx.Client, body: bytes, headers: dict[str, str], status: int, said: str) -> None:
    answer = http.post(PATH, content=body, headers=headers)
    assert answer.status_code == status, answer.text
    if status != 200:
        message = answer.json()["error"]["message"]
        assert said in message
        assert "\n" not in message


def test_a_slash_more_changes_nothing(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert http.get("/v1/models/").json() == listed
    assert http.get("/v1//models").json() == listed
    assert http.post(f"{PATH}/", json=BODY).status_code == 200


def test_methods(http: httpx.Client) -> None:
    for path in ("/v1/models", "/health", "/v1/models/"):
        answer = http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        refused = http.put(path)
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET")
    assert http.get(PATH).headers["allow"] == "POST"
    assert http.head(PATH).status_code == 405


def test_a_model_has_aliases(http: httpx.Client) -> None:
    for name in (MODEL, "mine", "gpt-5", "gpt-"):
        assert http.post(PATH, json=BODY | {"model": name}).status_code == 200
        assert http.get(f"/v1/models/{name}").json()["root"] == MODEL
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == [MODEL, "mine"]
    for name in ("mine2", "xgpt-5", "claude-x"):
        answer = http.post(PATH, json=BODY | {"model": name})
        assert answer.status_code == 404
        assert f"--model-alias {name}" in answer.json()["error"]["message"]
    message = {"model": "claude-x", "max_tokens": 3, "messages": [{"role": "user", "content": "?"}]}
    assert http.post("/v1/messages", json=message).json()["model"] == MODEL


@pytest.mark.parametrize("seed", [-1, 2**32 - 1])
def test_seeds_that_mean_none(server: RunningServer, http: httpx.Client, seed: int) -> None:
    http.post(PATH, json=BODY | {"seed": seed})
    http.post(PATH, json=BODY | {"seed": 5})
    seeds = [one.params.seed for one in server.engine.executor.seen]
    assert seeds[-4:] == [None, 5, 5, 5]


def test_special_tokens_are_added_unless_they_are_refused(server: RunningServer, http: httpx.Client) -> None:
    asked: list[bool] = []
    submit = server.service.submit

    async def noting(*args: Any, **options: Any) -> Any:
        asked.append(options["add_special_tokens"])
        return await submit(*args, **options)

    server.service.submit = noting  # type: ignore[method-assign]
    for value in (None, True, False):
        http.post(PATH, json=BODY | {"add_special_tokens": value})
    server.service.submit = submit  # type: ignore[method-assign]
    assert asked == [True, True, False]
