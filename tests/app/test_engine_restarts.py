"""However an engine's process ends, clients get an error, the engine restarts and the server stays up."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from neo_desktop.app.application import create_app
from neo_desktop.app.engines import process as processes
from neo_desktop.app.engines.generation import Generation
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.errors import EngineGoneError, EngineRestartingError, ServiceStoppedError
from neo_desktop.app.shelf import restarts
from neo_desktop.app.shelf.catalogue import Catalogue
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.app.shelf.model_loader import ModelLoader
from neo_desktop.app.shelf.restarts import Restarts, careful_levels, steps
from neo_desktop.engine.fallbacks import MECHANISMS, Fallbacks, fallbacks
from neo_desktop.engine.loading import BUILTIN_NAME
from neo_desktop.engine.options import BUILTIN, EngineOptions
from neo_desktop.engine.sampling_params import SamplingParams

from .child_engines import HUNG, KILLED, LOST, SEGFAULT, FragileLoader
from .conftest import until
from .test_chats_answers import serving

pytestmark = pytest.mark.anyio
TIMEOUT_S = 60


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def quick_and_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)
    monkeypatch.setattr(restarts, "PAUSES_S", (0.0, 0.0, 0.0))


@pytest.fixture
def loader(tmp_path: Path) -> FragileLoader:
    return FragileLoader(tmp_path)


async def loaded(host: ModelHost) -> None:
    await until(lambda: host.loading is None)


async def text_of(generation: Generation) -> str:
    async with generation:
        return "".join([output.text async for _, output in generation])


async def ask(service: EngineService, max_tokens: int = 3) -> str:
    return await text_of(await service.submit(["hello"], SamplingParams(max_tokens=max_tokens)))


def is_gone(pid: int) -> bool:
    try:
        return (
            psutil.Process(pid).status() == psutil.STATUS_ZOMBIE and psutil.Process(pid).ppid() != os.getpid()
        )
    except psutil.NoSuchProcess:
        return True


async def test_a_killed_process_is_told_to_everybody_and_started_again(loader: FragileLoader) -> None:
    host = ModelHost(load=loader)
    await host.begin("alpha")
    streams = [await host.service.submit([[50 + i]], SamplingParams(max_tokens=9000)) for i in range(3)]
    for stream in streams:
        await anext(aiter(stream))  # interrupt it after one token
    loader.now("hold")
    os.kill(loader.pids[0], signal.SIGKILL)
    for stream in streams:
        with pytest.raises(EngineRestartingError, match=r"was killed \(SIGKILL.*started again: send"):
            await text_of(stream)
    with pytest.raises(EngineRestartingError, match=r"SIGKILL.*alpha is being started again"):
        _ = host.service
    loader.now("hold", is_so=False)
    await loaded(host)
    assert await ask(host.service) == "fgh"
    assert len(loader.pids) == 2
    await host.stop()
    assert all(map(is_gone, loader.pids))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("token", "said"),
    [
        (KILLED, "was killed"),
        (SEGFAULT, r"crashed \(SIGSEGV\)"),
        (LOST, "the engine stopped: CUDA error: an illegal memory access was encountered. It is being"),
        (HUNG, "made no progress for 5 s"),
    ],
)
async def test_whatever_ends_it_the_next_request_is_answered(
    token: int, said: str, loader: FragileLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    if token == HUNG:
        monkeypatch.setattr(processes, "TIMEOUT_S", {"cpu": 5.0})
    host = ModelHost(load=loader)
    await host.begin("alpha")
    beside = await host.service.submit(["beside"], SamplingParams(max_tokens=9000))
    bad = await host.service.submit([[token]], SamplingParams(max_tokens=9000))
    for generation in (bad, beside):
        with pytest.raises(EngineRestartingError, match=said):
            async with asyncio.timeout(TIMEOUT_S):
                await text_of(generation)
    await loaded(host)
    assert await ask(host.service) == "fgh"
    assert is_gone(loader.pids[0])
    await host.stop()


def divided_processes() -> tuple[psutil.Process, psutil.Process]:
    """Return the processes of the engine and of the other rank of its model."""
    (found,) = [(child, *parts) for child in psutil.Process().children() if (parts := child.children())]
    engine, other = found
    return engine, other


@pytest.mark.sample(0)
async def test_a_divided_model_is_lost_and_started_again_as_a_whole() -> None:
    options = EngineOptions(
        device="cpu", policy="gpu-only", tensor_parallel=2, gpu_cache_tokens=1024, dtype="float32"
    )
    host = ModelHost(load=ModelLoader(Catalogue([], model=BUILTIN), options))
    await host.begin(BUILTIN_NAME)
    engine, other = divided_processes()
    stream = await host.service.submit(["hello"], SamplingParams(max_tokens=900, ignore_eos=True))
    await anext(aiter(stream))
    other.kill()
    with pytest.raises(EngineRestartingError, match=r"part 2 of the model, was ended by SIGKILL.* again"):
        async with asyncio.timeout(TIMEOUT_S):
            await text_of(stream)
    await loaded(host)
    assert await ask(host.service)
    assert is_gone(engine.pid)
    engine, other = divided_processes()
    other.kill()  # while no request runs
    await until(lambda: host.loading is not None)
    assert host.loading is not None
    assert "part 2 of the model" in (host.loading.reason or "")
    await host.unload()
    assert is_gone(engine.pid)
    await host.stop()
    assert not [part for child in psutil.Process().children() for part in child.children()]


async def test_an_engine_that_has_nothing_to_do_is_not_taken_for_hung(
    loader: FragileLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "TIMEOUT_S", {"cpu": 0.05})
    host = ModelHost(load=loader)
    await host.begin("alpha")
    await asyncio.sleep(1.0)
    monkeypatch.undo()
    assert len(loader.pids) == 1
    await host.stop()


async def test_after_too_many_ends_it_is_left_and_said_why(loader: FragileLoader) -> None:
    host = ModelHost(load=loader)
    await host.begin("alpha")
    loader.now("die")
    stream = await host.service.submit([[KILLED]], SamplingParams(max_tokens=9000))
    with pytest.raises(EngineRestartingError):
        await text_of(stream)
    await loaded(host)
    assert len(loader.pids) == 1 + 3
    with pytest.raises(EngineGoneError, match=r"3 times within 10 minutes.*exit status 3.*SIGKILL"):
        _ = host.service
    async with client(host) as http:
        health = await http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
    loader.now("die", is_so=False)
    await host.begin("alpha")  # the user may try again
    assert await ask(host.service) == "fgh"
    await host.stop()


async def test_engines_that_work_and_end_are_counted_and_started_with_less(loader: FragileLoader) -> None:
    host = ModelHost(load=loader)
    await host.begin("alpha")
    said, limits = [], []
    for _ in range(4):
        bad = await host.service.submit([[KILLED]], SamplingParams(max_tokens=9000))
        with pytest.raises(EngineRestartingError) as told:
            await text_of(bad)
        said.append(str(told.value))
        await loaded(host)
        if host.has_service:
            limits.append(dict(fallbacks.limits()))
            assert await ask(host.service) == "fgh"
    assert all("send the request again" in text for text in said[:3])
    assert "so it is left" in said[3]
    assert not host.has_service
    assert limits == [{}, careful_levels("cpu", 1), careful_levels("cpu", 2)]
    await host.stop()


async def test_meanwhile_the_server_answers_and_says_so(loader: FragileLoader) -> None:
    host = ModelHost(load=loader)
    await host.begin("alpha")
    told: list[str | None] = []
    host.listeners.append(lambda: told.append(host.loading and host.loading.reason))
    async with client(host) as http:
        loader.now("hold")
        answer = await http.post("/v1/completions", json={"prompt": [KILLED], "max_tokens": 900})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_restarting")
        health = await http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "restarting")
        assert "SIGKILL" in health.json()["reason"]
        answer = await http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_restarting")
        assert int(answer.headers["Retry-After"]) > 0
        assert told[0] is not None  # shown on the page
        loader.now("hold", is_so=False)
        await loaded(host)
        assert (await http.get("/health")).json() == {"status": "ok", "model": "alpha", "backend": "neo"}
        answer = await http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3})
        assert answer.json()["choices"][0]["text"] == "fgh"
    await host.stop()


async def test_a_start_that_nobody_wants_any_more_is_stopped_at_once(loader: FragileLoader) -> None:
    host = ModelHost(load=loader)
    loader.now("hold")
    host.begin("alpha")
    await until(lambda: host.loading is not None and host.loading.share > 0)
    async with asyncio.timeout(TIMEOUT_S):
        await host.unload()
    assert (host.loading, host.error, host.name) == (None, None, None)
    await until(lambda: is_gone(loader.pids[0]))
    await host.stop()


async def test_unloading_ends_the_process_and_an_idle_one_comes_back(loader: FragileLoader) -> None:
    host = ModelHost(load=loader, name="alpha", idle_unload_s=0.05)
    await host.start()
    await until(lambda: host.is_resting and is_gone(loader.pids[0]))
    assert await ask(await host.ready()) == "fgh"
    await until(lambda: host.is_resting)
    await host.begin("beta")
    service = host.service
    stream = await service.submit(["x"], SamplingParams(max_tokens=9000))
    await host.unload()
    with pytest.raises(ServiceStoppedError, match="unloaded"):
        await text_of(stream)
    assert all(map(is_gone, loader.pids))
    assert len(loader.pids) == 3
    await host.stop()


async def test_a_hung_process_does_not_hold_unloading_up(loader: FragileLoader) -> None:
    host = ModelHost(load=loader)
    await host.begin("alpha")
    stream = await host.service.submit([[HUNG]], SamplingParams(max_tokens=9000))
    await anext(aiter(stream))
    async with asyncio.timeout(TIMEOUT_S):
        await host.unload()
    assert is_gone(loader.pids[0])
    await host.stop()


def test_an_answer_that_was_cut_is_kept_and_goes_on(loader: FragileLoader, tmp_path: Path) -> None:
    host = ModelHost(load=loader, name="alpha")
    with serving(host, tmp_path / "chats") as chats:
        chat_id = chats.new_chat(max_tokens=2000)
        _, answer = chats.ask(chat_id, "one")
        chats.until(answer, lambda now: bool(now["text"]))
        os.kill(loader.pids[0], signal.SIGKILL)
        assert "started again" in chats.ended(answer)["error"]
        chats.call("resume", answer["id"])
        assert chats.ended(answer)["state"] == "done"


def test_starts_are_counted_within_ten_minutes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "PAUSES_S", (1.0, 2.0))
    now = 0.0
    counted = Restarts(lambda: now)
    pauses = []
    for now in (0.0, 1.0, 2.0, 599.0, 600.5, 602.0):  # noqa: B007
        pauses.append(counted.pause_s)
        if pauses[-1] is not None:
            counted.begun()
    assert pauses == [1.0, 2.0, None, None, 2.0, 2.0]


def test_who_has_a_gpu_is_told_how_to_go_on_without() -> None:
    counted = Restarts()
    counted.ended("the GPU was lost")
    assert "neo-desktop chat --device cpu" in counted.verdict("alpha", "cuda")
    assert "--device" not in counted.verdict("alpha", "cpu")


def client(host: ModelHost) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(host)), base_url="http://127.0.0.1")


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_steps_only_lead_down_and_end_at_the_lowest(device_type: str) -> None:
    descending = Fallbacks()
    for step in steps(device_type):
        for mechanism, level in step.items():
            descending.limit(mechanism, level, "a step", is_told=True)
            assert descending.level(mechanism) == level
    for name, each in MECHANISMS.items():
        if device_type == "cuda" or not each.is_for_gpu:
            assert descending.level(name) == each.levels[-1].name
