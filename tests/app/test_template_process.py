"""Chat templates in a child process: hostile ones are refused, in bounded time and memory."""

import asyncio
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import httpx
import psutil
import pytest

from neo_desktop.app.templates import chat_templates
from neo_desktop.app.templates.chat_template import MAX_MEMORY_BYTES, ChatTemplate, ChatTemplateError
from neo_desktop.app.templates.chat_templates import TemplateProcess

from .conftest import running
from .fake_engine import FakeExecutor, make_engine
from .test_chat_template import CHATS, SPECIAL_TOKENS, TEMPLATES

T = TypeVar("T")
ECHO = "{{ messages[0].content }}"
TWICE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
REPLACE = "{% set ns = namespace(x='xxxxxxxxxx') %}{% for i in range(40) %}"
REPLACE += "{% set ns.x = ns.x | replace('x', 'xxxxxxxxxx') %}{% endfor %}{{ ns.x }}"
BOMBS = [
    "{{ 'x' * 10**10 }}",
    "{% set n = 10**10 %}{{ 'x' * (n + messages | length) }}",
    "{{ 'x' | center(10**10) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ messages | tojson(indent=10**10) }}",
    REPLACE,
    "{{ messages | slice(10**10) | list }}",
    "{% for i in [1] | slice(10**10) %}{% endfor %}",
    TWICE,
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ (8 + messages | length) ** (9 ** 9) }}",
    "{{ lipsum(n=10**7) }}",
    "{% for i in range(99999) %}{{ 'x' * 10**6 }}{% endfor %}",
]


def with_template(source: str | None, use: Callable[[TemplateProcess], Awaitable[T]]) -> T:
    async def scenario() -> T:
        process = TemplateProcess(source, SPECIAL_TOKENS)
        await process.start()
        try:
            return await use(process)
        finally:
            await process.stop()

    return asyncio.run(scenario())


def chat(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_process_writes_what_is_written_here(template: str) -> None:
    async def use(process: TemplateProcess) -> list[str]:
        return [await process.render(messages, {"enable_thinking": False}) for messages in CHATS.values()]

    here = ChatTemplate(TEMPLATES[template], SPECIAL_TOKENS)
    expected = [here.render(messages, {"enable_thinking": False}) for messages in CHATS.values()]
    assert with_template(TEMPLATES[template], use) == expected


@pytest.mark.sample(4)
@pytest.mark.parametrize("source", BOMBS, ids=range(len(BOMBS)))
def test_a_bomb_is_refused_and_the_next_chat_is_not(source: str) -> None:
    async def use(process: TemplateProcess) -> str:
        with pytest.raises(ChatTemplateError, match=r"the model's chat template refused: ."):
            await process.render(chat("bomb"))
        return await process.render(chat("tea"))

    guarded = "{% if messages[0].content == 'bomb' %}" + source + "{% else %}" + ECHO + "{% endif %}"
    assert with_template(guarded, use) == "tea"


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}", "{{ [1] | slice(10**10) | list }}"]
)
def test_a_bomb_may_go_off_while_it_is_compiled(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        with_template(source, lambda process: process.render(chat("x")))


def test_a_bomb_never_takes_more_than_its_memory() -> None:
    peaks: list[int] = []

    async def use(process: TemplateProcess) -> None:
        assert process._process is not None
        child = psutil.Process(process._process.pid)
        bombing = asyncio.create_task(process.render(chat("")))
        while not bombing.done():
            try:
                peaks.append(child.memory_info().rss)
            except psutil.Error:
                break
            await asyncio.sleep(0.001)
        with pytest.raises(ChatTemplateError):
            await bombing

    with_template(REPLACE, use)
    assert max(peaks) <= MAX_MEMORY_BYTES


def test_one_that_sleeps_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(process: TemplateProcess) -> str:
        assert process._process is not None
        stopped = process._process.pid
        psutil.Process(stopped).suspend()
        monkeypatch.setattr(chat_templates, "MAX_WAIT_S", 0.2)
        with pytest.raises(ChatTemplateError, match=r"takes more than 0\.2 s"):
            await process.render(chat("a"))
        monkeypatch.setattr(chat_templates, "MAX_WAIT_S", 30)
        return await process.render(chat("b"))

    assert with_template(ECHO, use) == "b"


def test_many_at_once_get_their_own() -> None:
    async def use(process: TemplateProcess) -> list[str]:
        return await asyncio.gather(*(process.render(chat(f"{i} 你好 \ud800" * 99)) for i in range(50)))

    assert with_template(ECHO, use) == [f"{i} 你好 \ud800" * 99 for i in range(50)]


def test_it_ends_when_the_server_is_killed(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import asyncio
        from neo_desktop.app.templates.chat_templates import TemplateProcess

        async def main():
            process = TemplateProcess("x", {})
            await process.render([])
            print(process._process.pid, flush=True)
            await asyncio.sleep(300)

        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        child = psutil.Process(int(server.stdout.readline()))
        server.send_signal(signal.SIGKILL)
        child.wait(30)


def test_the_template_sees_no_secret_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEO_DESKTOP_API_KEY", "secret")

    async def use(process: TemplateProcess) -> dict[str, str]:
        assert process._process is not None
        return psutil.Process(process._process.pid).environ()

    assert "secret" not in with_template("x", use).values()


def test_the_server_answers_while_a_template_is_hostile(executor: FakeExecutor) -> None:
    with running(make_engine(executor, template=TWICE)) as server:
        answers: list[httpx.Response] = []

        def ask() -> None:
            body = {"messages": chat("x")}
            url = f"{server.url}/v1/chat/completions"
            answers.append(httpx.post(url, json=body, timeout=60, trust_env=False))

        asking = threading.Thread(target=ask)
        asking.start()
        num_answered = 0
        while asking.is_alive():
            assert httpx.get(f"{server.url}/health", timeout=30, trust_env=False).is_success
            num_answered += not answers
        asking.join()
        assert num_answered > 1
        assert answers[0].status_code == 400
        assert "processor time" in answers[0].json()["error"]["message"]
