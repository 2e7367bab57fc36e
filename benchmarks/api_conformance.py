#!/usr/bin/env python3
"""Check the API with real clients and judges: openai, LangChain, anthropic, llm-comply, schemathesis.

    python -m benchmarks.api_conformance                 starts a server with the built-in model
    python -m benchmarks.api_conformance --url http://127.0.0.1:8000 --cases 10000

The built-in model is very small, so checks test the form of answers, not their sense. Exit status 1: a check
failed that is not among the known gaps.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import anthropic
import httpx
import openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from scripts.server_process import served

BIN = Path(sys.executable).parent
QUESTION: Any = [{"role": "user", "content": "What is a KV cache?"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {
        "size": {"enum": ["small", "large"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["size", "count"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "choose", "description": "Choose a size.", "parameters": SCHEMA},
}

# Intended gaps: fields that llm-comply requires and the server omits.
KNOWN_GAPS = {
    "chat-image-input": "text only",
    "image-input": "text only",
    "anth-image-input": "text only",
    "chat-error-handling": "the model may be left out",
    "error-handling": "the model may be left out",
    "chat-tool-calling": "the built-in model does not end a text within its arguments",
    "anth-tool-calling": "the built-in model does not end a text within its arguments",
}


class Size(BaseModel):
    """A choice."""

    size: Literal["small", "large"]
    count: Annotated[int, Field(ge=0, le=99)]


def check_openai(url: str, model: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120)
    asked: Any = {"model": model, "messages": QUESTION, "max_tokens": 60}
    whole = client.chat.completions.create(temperature=0, **asked).choices[0].message.content
    parts = client.chat.completions.create(temperature=0, stream=True, **asked)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole
    forced = client.chat.completions.create(tools=[TOOL], tool_choice="required", **asked)
    check_arguments(forced.choices[0].message.tool_calls[0].function.arguments)
    form: Any = {"type": "json_schema", "json_schema": {"name": "size", "schema": SCHEMA}}
    check_arguments(
        client.chat.completions.create(response_format=form, **asked).choices[0].message.content or ""
    )
    parsed = client.chat.completions.parse(response_format=Size, **asked)
    assert parsed.choices[0].message.parsed is not None
    response = client.responses.create(model=model, input="What is a KV cache?", max_output_tokens=60)
    assert client.responses.retrieve(response.id).output_text == response.output_text
    follow: Any = {"model": model, "input": "And then?", "max_output_tokens": 20}
    events = list(client.responses.create(previous_response_id=response.id, stream=True, **follow))
    assert events[-1].type in ("response.completed", "response.incomplete")
    vectors = client.embeddings.create(model=model, input=["a cat", "a dog"]).data
    assert abs(sum(x * x for x in vectors[0].embedding) - 1) < 1e-3
    assert (
        client.completions.create(model=model, prompt="A KV cache", max_tokens=5, echo=True).choices[0].text
    )


def check_arguments(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"size", "count"}, value
    assert value["size"] in ("small", "large")
    assert 0 <= value["count"] <= 99


def check_langchain(url: str, model: str) -> None:
    asked: Any = {"api_key": "none", "model": model, "max_tokens": 200, "timeout": 120}
    chat = ChatOpenAI(base_url=f"{url}/v1", **asked)
    bound = chat.bind_tools([TOOL], tool_choice="choose")
    (call,) = bound.invoke("Choose a size.").tool_calls[:1]
    check_arguments(json.dumps(call["args"]))
    streamed: Any = None
    for part in bound.stream("Choose a size."):
        streamed = part if streamed is None else streamed + part
    check_arguments(json.dumps(streamed.tool_calls[0]["args"]))
    schema = SCHEMA | {"title": "Size", "description": "A choice."}
    for method in ("function_calling", "json_schema"):
        value = chat.with_structured_output(schema, method=method).invoke("Choose a size.")
        check_arguments(json.dumps(value))


def check_anthropic(url: str, model: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", timeout=120)
    asked: Any = {"model": model, "messages": QUESTION, "max_tokens": 60}
    assert client.messages.create(**asked).content[0].type == "text"
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream)
    tool: Any = {"name": "choose", "description": "Choose a size.", "input_schema": SCHEMA}
    message = client.messages.create(tools=[tool], tool_choice={"type": "any"}, **asked)
    check_arguments(json.dumps(message.content[0].input))
    assert client.messages.count_tokens(model=model, messages=QUESTION).input_tokens > 5


def check_llm_comply(url: str, model: str, form: str) -> str:
    options = ["--format", form, "-u", f"{url}/v1", "-k", "none", "-m", model, "--json"]
    program = BIN / "llm-comply"
    finished = subprocess.run([program, *options], capture_output=True, text=True, timeout=600, check=False)
    results = json.loads(finished.stdout)["results"]
    failed = {result["id"]: result["errors"] for result in results if result["status"] == "failed"}
    unknown = {name: errors for name, errors in failed.items() if name not in KNOWN_GAPS}
    assert not unknown, unknown
    passed = sum(result["status"] == "passed" for result in results)
    gaps = "; ".join(f"{name} ({KNOWN_GAPS[name]})" for name in failed)
    return f"{passed} of {len(results)} passed; known gaps: {gaps or 'none'}"


def check_schemathesis(url: str, num_cases: int) -> str:
    checks = "not_a_server_error,content_type_conformance,status_code_conformance"
    num_operations = sum(
        len(methods) for methods in httpx.get(f"{url}/openapi.json").json()["paths"].values()
    )
    command: list[str | Path] = [
        BIN / "schemathesis", "run", f"{url}/openapi.json", "--checks", checks, "--phases", "fuzzing",
        "--max-examples", str(max(1, num_cases // num_operations)), "--request-timeout", "120",
        "--continue-on-failure", "--no-color", "--suppress-health-check", "all",
    ]  # fmt: skip
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    summary = " ".join(
        line.strip() for line in finished.stdout.splitlines() if "generated" in line or "Tested" in line
    )
    assert finished.returncode == 0, finished.stdout[-8000:]
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="of a server that runs; without it, one is started")
    parser.add_argument("--cases", type=int, default=1000, help="requests that schemathesis makes, about")
    parser.add_argument("--only", help="run the checks whose name holds this text")
    options = parser.parse_args()
    with served(options.url) as url:
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        checks: dict[str, Callable[[], str | None]] = {
            "openai": lambda: check_openai(url, model),
            "langchain": lambda: check_langchain(url, model),
            "anthropic": lambda: check_anthropic(url, model),
            "llm-comply openai-chat": lambda: check_llm_comply(url, model, "openai-chat"),
            "llm-comply open-responses": lambda: check_llm_comply(url, model, "open-responses"),
            "llm-comply anthropic": lambda: check_llm_comply(url, model, "anthropic"),
            "schemathesis": lambda: check_schemathesis(url, options.cases),
        }
        num_failed = 0
        for name, check in checks.items():
            if options.only and options.only not in name:
                continue
            begun_s = time.perf_counter()
            try:
                told = check() or "passed"
            except Exception as error:
                num_failed += 1
                told = f"FAILED: {type(error).__name__}: {error}"
            print(f"{name:28} {time.perf_counter() - begun_s:6.1f} s  {told}", flush=True)
    raise SystemExit(bool(num_failed))


if __name__ == "__main__":
    main()
