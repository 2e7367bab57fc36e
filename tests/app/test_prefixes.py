"""Prompts that begin alike share KV, and each protocol's usage says how much."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import anthropic
import openai
import pytest

from .conftest import RunningServer, running
from .fake_engine import BLOCK_SIZE, MODEL, ScriptedExecutor, make_engine

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
SYSTEM = "You are a helpful assistant that answers in one sentence, and never guesses. "
Turns = list[tuple[str, str]]


@pytest.fixture
def executor() -> ScriptedExecutor:
    return ScriptedExecutor(answers=["Yes, it is."])


@pytest.fixture
def server(executor: ScriptedExecutor) -> Iterator[RunningServer]:
    with running(make_engine(executor, template=TEMPLATE, context_tokens=4096, num_blocks=1024)) as server:
        yield server


@dataclass
class Asked:
    """Asks by every protocol, and notes what the engine has computed: its reference."""

    server: RunningServer
    computed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gpt: openai.OpenAI = self.server.client()
        self.claude = anthropic.Anthropic(base_url=self.server.url, api_key="none", max_retries=0, timeout=30)

    def reusable(self, prompt: str) -> int:
        """Tokens of the longest beginning that is computed: whole blocks, and not the last token."""
        longest = max((_common(prompt, earlier) for earlier in self.computed), default=0)
        return min(longest, len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE

    def note(self, prompt: str, answer: str) -> None:
        self.computed.append(prompt + answer)  # the token that ends it is never read

    def ask(self, protocol: str, turns: Turns, system: str = SYSTEM, sent: Any = None) -> str:
        """Return the answer; the usage must be that of the reference. `sent`: the field `system`."""
        prompt = f"<system>{system}" + "".join(f"<{role}>{text}" for role, text in turns) + "<assistant>"
        expected = self.reusable(prompt)
        messages: Any = [{"role": role, "content": text} for role, text in turns]
        told: Any = [{"role": "system", "content": system}]
        match protocol:
            case "messages":
                reply = self.claude.messages.create(
                    model=MODEL, messages=messages, system=sent or system, max_tokens=50
                )
                text = "".join(block.text for block in reply.content if block.type == "text")
                cached = reply.usage.cache_read_input_tokens
                total = reply.usage.input_tokens + (cached or 0)
            case "responses":
                response = self.gpt.responses.create(model=MODEL, input=told + messages)
                text, usage = response.output_text, response.usage
                assert usage is not None
                cached, total = usage.input_tokens_details.cached_tokens, usage.input_tokens
            case _:
                *_, last = self.gpt.chat.completions.create(
                    model=MODEL, messages=told + messages, stream=True, stream_options={"include_usage": True}
                )
                text = "Yes, it is."
                assert last.usage is not None
                assert last.usage.prompt_tokens_details is not None
                cached = last.usage.prompt_tokens_details.cached_tokens
                total = last.usage.prompt_tokens
        assert (cached, total) == (expected, len(prompt))
        self.note(prompt, text)
        return text


def _common(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.fixture
def asked(server: RunningServer) -> Asked:
    return Asked(server)


@pytest.mark.parametrize("protocol", ["chat", "messages", "responses"])
def test_turns_retries_edits_and_branches_reuse_what_is_computed(asked: Asked, protocol: str) -> None:
    first: Turns = [("user", "Is the sky blue on a clear day?")]
    answer = asked.ask(protocol, first)
    second = [*first, ("assistant", answer), ("user", "And at night?")]
    for turns in (
        second,
        second,  # retried
        [*second[:2], ("user", "And in the evening, when the sun goes down?")],  # edited: a branch
        [*second, ("assistant", answer), ("user", "Why?")],
        [("user", "Is the grass green?")],  # another chat with this system prompt
    ):
        asked.ask(protocol, turns)
    asked.ask(protocol, first, system="Another prompt altogether, which shares nothing with the others.")
    assert asked.reusable("<system>" + SYSTEM) > 0


def test_protocols_share_with_each_other(asked: Asked) -> None:
    turns: Turns = [("user", "Is the sky blue on a clear day?")]
    for protocol in ("chat", "messages", "responses"):
        asked.ask(protocol, turns)


def test_claude_codes_billing_header_breaks_no_prefix_and_dates_are_content(asked: Asked) -> None:
    """The header's version and hash change with each request; a date is part of the prompt."""
    turns: Turns = [("user", "Is the sky blue on a clear day?")]
    for version, secret in (("2.1.37.0d9", "fa690"), ("2.1.37.5b1", "0aaa9")):
        header = f"x-anthropic-billing-header: cc_version={version}; cc_entrypoint=cli; cch={secret};"
        asked.ask("messages", turns, sent=[{"type": "text", "text": text} for text in (header, SYSTEM)])
        asked.ask("messages", turns, sent=f"{header}\n{SYSTEM}")
    assert asked.reusable(asked.computed[0]) > len(SYSTEM)
    for day in ("2026-03-16", "2026-03-17"):
        asked.ask("messages", turns, system=f"Today is {day}. {SYSTEM}")
        asked.ask("messages", [("user", f"x-anthropic-billing-header: cch={day};\nWhat is this?")])


def test_requests_that_run_together_share(asked: Asked, executor: ScriptedExecutor) -> None:
    executor.answers = ["Yes, it is." * 250]
    prompt = f"<system>{SYSTEM}<user>Is it?<assistant>"
    messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Is it?"}]
    executor.open.clear()
    executor.steps.release(3)
    stream = asked.gpt.chat.completions.create(model=MODEL, messages=messages, stream=True)
    next(iter(stream))
    asked.note(prompt, "")
    executor.answers = ["Yes, it is."]
    has_answer = threading.Event()

    def step() -> None:
        while not has_answer.wait(0.02):
            executor.steps.release()

    stepping = threading.Thread(target=step)
    stepping.start()
    try:
        asked.ask("chat", [("user", "Is it not?")])
    finally:
        has_answer.set()
        stepping.join()
        executor.open.set()
        stream.close()
