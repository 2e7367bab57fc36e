"""LangChain's agents work with the API."""

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from .conftest import running
from .fake_engine import MODEL, ScriptedExecutor, make_engine
from .test_chat import BOTH, TEMPLATES


class Weather(BaseModel):
    """The weather of a place."""

    place: str


@pytest.fixture(scope="module")
def executor() -> ScriptedExecutor:
    return ScriptedExecutor()


@pytest.fixture(scope="module")
def chat(executor: ScriptedExecutor) -> Iterator[ChatOpenAI]:
    engine = make_engine(executor, template=TEMPLATES["hermes"], context_tokens=4096, num_blocks=512)
    with running(engine) as server:
        yield ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model=MODEL, timeout=30, max_retries=0)


def test_bound_tools(chat: ChatOpenAI, executor: ScriptedExecutor) -> None:
    bound = chat.bind_tools([Weather])
    executor.answers = [BOTH["hermes"].replace("weather", "Weather")]
    answer: Any = bound.invoke("weather?")
    expected = [("Weather", {"place": "Wien"}), ("Weather", {"place": "Ulm"})]
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == expected
    streamed: Any = sum(bound.stream("weather?"), AIMessageChunk(""))
    assert [(call["name"], call["args"]) for call in streamed.tool_calls] == expected
    executor.answers = ["Rain."]
    results = [ToolMessage("rain", tool_call_id=call["id"]) for call in answer.tool_calls]
    assert bound.invoke([HumanMessage("weather?"), answer, *results]).content == "Rain."


@pytest.mark.parametrize(
    ("method", "written"),
    [
        ("function_calling", '{"name": "Weather", "arguments": {"place": "Wien"}}\n</tool_call>'),
        ("json_schema", '{"place": "Wien"}'),
        ("json_mode", '{"place": "Wien"}'),
    ],
)
def test_structured_output(chat: ChatOpenAI, executor: ScriptedExecutor, method: Any, written: str) -> None:
    executor.answers = [written]
    assert chat.with_structured_output(Weather, method=method).invoke("weather?") == Weather(place="Wien")
