"""The load suite's client gets along with servers as they are, and says what it could not learn from them."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import pytest
from fake_openai_server import TOKENS_PER_WORD, Behaviour, fake_openai_server

import neo_desktop.models
from neo_desktop import Engine
from neo_desktop.app.bench.load.target import ClientRequest, Outcome, RequestRecord, TargetError, send_all
from neo_desktop.app.bench.load.url_target import UrlTarget
from neo_desktop.app.service import EngineService
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.app.web.server import Server, claim_port, create_app
from neo_desktop.engine.options import BUILTIN

Use = Callable[[UrlTarget], Coroutine[None, None, list[RequestRecord]]]


def ask(count: int = 1, prompt_tokens: int = 60, max_tokens: int = 8) -> Use:
    async def use(target: UrlTarget) -> list[RequestRecord]:
        prompts = [target.make_prompt(prompt_tokens) for _ in range(count)]
        return await send_all(target, [ClientRequest(0.0, prompt, max_tokens) for prompt in prompts])

    return use


def with_target(target: UrlTarget, use: Use) -> list[RequestRecord]:
    async def run() -> list[RequestRecord]:
        try:
            await target.start()
            return await use(target)
        finally:
            await target.close()

    return asyncio.run(run())


def measured(behaviour: Behaviour, use: Use | None = None) -> tuple[list[RequestRecord], str]:
    with fake_openai_server(behaviour) as url:
        target = UrlTarget(url)
        return with_target(target, use or ask()), " ".join(target.notes)


def test_tokens_are_counted_by_the_server_and_prompts_are_as_long_as_asked_for() -> None:
    behaviour = Behaviour(tokens_per_chunk=4)
    (record,), notes = measured(behaviour)
    assert record.outcome is Outcome.FINISHED
    assert record.prompt_tokens == 60
    assert record.output_tokens == 8
    assert len(record.chunks_ms) == 2  # of four tokens each
    assert f"words of {TOKENS_PER_WORD:.2f} tokens" in notes
    sent = behaviour.bodies[-1]
    assert sent["model"] == "first"
    assert (sent["temperature"], sent["ignore_eos"], sent["stream"]) == (0.0, True, True)


def test_no_prompt_begins_like_another() -> None:
    behaviour = Behaviour()
    measured(behaviour, ask(count=20))
    measured(behaviour, ask(count=20))  # nor like one of an earlier run
    beginnings = [tuple(body["prompt"].split()[:12]) for body in behaviour.bodies]
    assert len(set(beginnings)) == len(beginnings) > 40


@pytest.mark.parametrize("field", ["ignore_eos", "stream_options"])
def test_a_field_that_the_server_refuses_is_left_out_with_a_note(field: str) -> None:
    behaviour = Behaviour(unknown_fields=frozenset({field}))
    (record,), notes = measured(behaviour)
    assert record.outcome is Outcome.FINISHED
    assert field not in behaviour.bodies[-1]
    assert ("shorter than was asked for" in notes) == (field == "ignore_eos")
    assert ("does not say how many tokens" in notes) == (field == "stream_options")
    assert record.output_tokens == (2 if field == "ignore_eos" else 8)


def test_a_server_that_knows_neither_is_asked_for_neither() -> None:
    behaviour = Behaviour(unknown_fields=frozenset({"ignore_eos", "stream_options"}))
    (record,), notes = measured(behaviour)
    assert record.outcome is Outcome.FINISHED
    assert behaviour.bodies[-1].keys().isdisjoint(behaviour.unknown_fields)
    assert "shorter than was asked for" in notes
    assert "does not say how many tokens" in notes


def test_without_usage_chunks_are_counted_and_words_taken_for_tokens() -> None:
    (record,), notes = measured(Behaviour(ignored_fields=frozenset({"stream_options"})))
    assert (record.prompt_tokens, record.output_tokens) == (60, 8)
    assert "every chunk counts as one output token" in notes


def test_a_server_that_takes_ignore_eos_and_forgets_it_is_noticed() -> None:
    (record,), notes = measured(Behaviour(ignored_fields=frozenset({"ignore_eos"})))
    assert record.output_tokens == 2
    assert "answers may be shorter" in notes


@pytest.mark.parametrize(
    ("behaviour", "outcome", "reason", "said"),
    [
        (Behaviour(status=500), Outcome.FAILED, "HTTP 500", "this did not work out"),
        (Behaviour(status=503), Outcome.REFUSED, "HTTP 503", "this did not work out"),
        (Behaviour(status=400), Outcome.REFUSED, "HTTP 400", "this did not work out"),
        (Behaviour(ending="hang up"), Outcome.FAILED, "connection lost", "did it stop?"),
        (Behaviour(ending="stop"), Outcome.FAILED, "stream cut off", "in the middle of an answer"),
        (Behaviour(ending="error"), Outcome.FAILED, "error in the stream", "out of memory"),
        (Behaviour(ending="garbage"), Outcome.FAILED, "not JSON", "not JSON"),
    ],
    ids=lambda value: value.ending + str(value.status) if isinstance(value, Behaviour) else None,
)
def test_what_goes_wrong_with_a_request_is_recorded(
    behaviour: Behaviour, outcome: Outcome, reason: str, said: str
) -> None:
    records, _ = measured(behaviour, ask(count=3))
    assert {(record.outcome, record.reason) for record in records} == {(outcome, reason)}
    assert said in records[0].message


def test_a_server_that_wants_a_key_gets_it_or_is_named_as_the_reason() -> None:
    with fake_openai_server(Behaviour(api_key="secret")) as url:
        (record,) = with_target(UrlTarget(url, api_key="secret"), ask())
        assert record.outcome is Outcome.FINISHED
        with pytest.raises(TargetError, match=r"HTTP 401 .*give the key that the server wants"):
            with_target(UrlTarget(url), ask())


def test_a_wrong_path_a_missing_model_and_an_empty_list_are_told() -> None:
    with fake_openai_server(Behaviour()) as url:
        assert UrlTarget(f"{url}/").url == UrlTarget(f"{url}/v1/").url == f"{url}/v1"
        with pytest.raises(TargetError, match=r"/v2/models answered HTTP 404 .*ends with /v1"):
            with_target(UrlTarget(f"{url}/v2"), ask())
        with pytest.raises(TargetError, match=r"no model third.*the model's name"):
            with_target(UrlTarget(url, model="third"), ask())
        (record,) = with_target(UrlTarget(url, model="second"), ask())
        assert record.outcome is Outcome.FINISHED
    with (
        fake_openai_server(Behaviour(models=())) as url,
        pytest.raises(TargetError, match="lists no model: name the one to use"),
    ):
        with_target(UrlTarget(url), ask())


def test_a_server_that_is_not_there_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(TargetError, match=f"{port}.*no connection.*is the server running"):
        with_target(UrlTarget(f"http://127.0.0.1:{port}"), ask())


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://localhost", "http://", "", "http://[::1", "http://a:b"]
)
def test_what_is_no_address_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="write it like http://localhost:8000/v1"):
        UrlTarget(url)


def test_a_password_does_not_get_into_the_report() -> None:
    with pytest.raises(ValueError, match="would stand in the report: give an API key") as caught:
        UrlTarget("http://me:secret@localhost:8000")
    assert "secret" not in str(caught.value)


def test_a_proxy_from_the_environment_is_not_asked_for_this_computer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    (record,), _ = measured(Behaviour())
    assert record.outcome is Outcome.FINISHED


@pytest.fixture(scope="module")
def own_server() -> Iterator[str]:
    if not (Path(neo_desktop.models.__file__).parent / BUILTIN / "config.json").exists():
        pytest.skip("the built-in model is not in this checkout")
    with Engine.from_pretrained(BUILTIN, device="cpu", cpu_cache_tokens=4096, gpu_cache_tokens=0) as engine:
        sock = claim_port("127.0.0.1", 0)
        is_ready = threading.Event()
        server = Server(create_app(ModelHost(EngineService(engine))), is_ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        assert is_ready.wait(30)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        server.should_exit = True
        thread.join(30)


def test_our_own_server(own_server: str) -> None:
    target = UrlTarget(own_server)
    records = with_target(target, ask(count=6, prompt_tokens=80, max_tokens=12))
    assert target.model == "neo-desktop-guide"
    for record in records:
        assert record.outcome is Outcome.FINISHED
        assert record.output_tokens == 12
        assert 60 <= record.prompt_tokens <= 100
        assert record.cached_tokens == 0
        assert 1 <= len(record.chunks_ms) <= 12


def test_more_streams_at_once_than_a_process_may_usually_have_files_open() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"this process may have {hard} files open at most")
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 20, hard))
    try:
        records, _ = measured(Behaviour(), ask(count=150))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert {record.outcome for record in records} == {Outcome.FINISHED}
