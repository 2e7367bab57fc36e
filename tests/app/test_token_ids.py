"""Token ids beside the text, as requested by vLLM's clients."""

import json
from typing import Any

import httpx
import pytest

PROMPT = "xx"
ASKED: dict[str, Any] = {"max_tokens": 4, "seed": 1, "n": 2, "return_token_ids": True}
CHAT = {"messages": [{"role": "user", "content": PROMPT}]} | ASKED


def chunks(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = http.post(path, json=body | {"stream": True}).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def test_ids_are_those_of_prompt_and_text(http: httpx.Client) -> None:
    choices = http.post("/v1/completions", json={"prompt": [PROMPT, "y"]} | ASKED).json()["choices"]
    for choice in choices:  # in the test's vocabulary a token is a byte
        assert bytes(choice["token_ids"]).decode() == choice["text"]
    assert [bytes(choice["prompt_token_ids"]).decode() for choice in choices] == [PROMPT] * 2 + ["y"] * 2
    answer = http.post("/v1/chat/completions", json=CHAT).json()
    assert PROMPT in bytes(answer["prompt_token_ids"]).decode()
    for choice in answer["choices"]:
        assert bytes(choice["token_ids"]).decode() == choice["message"]["content"]


@pytest.mark.parametrize(
    ("path", "body"), [("chat/completions", CHAT), ("completions", {"prompt": PROMPT} | ASKED)]
)
def test_a_stream_brings_them_with_their_text(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    ids: dict[int, list[int]] = {0: [], 1: []}
    texts = {0: "", 1: ""}
    for chunk in chunks(http, f"/v1/{path}", body):
        for choice in chunk["choices"]:
            ids[choice["index"]] += choice["token_ids"]
            texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
    assert {index: bytes(found).decode() for index, found in ids.items()} == texts
    assert all(len(found) == ASKED["max_tokens"] for found in ids.values())


def test_nobody_gets_them_unasked(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": PROMPT}).json()
    assert "token_ids" not in answer["choices"][0]
