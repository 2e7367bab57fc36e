"""Loading and unloading of models while the server runs."""

import asyncio
import threading
import weakref
from dataclasses import dataclass, field

import httpx
import pytest

from neo_desktop import Engine
from neo_desktop.app.application import create_app
from neo_desktop.app.engines.generation import Generation
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.errors import (
    ModelLoadingError,
    NoModelError,
    ServiceStoppedError,
)
from neo_desktop.app.shelf.hosting import ModelHost, ShelfError
from neo_desktop.engine.kv_tier import MEASURED_TIERS
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.predict.cost_model import ZERO
from neo_desktop.engine.progress import Progress
from neo_desktop.engine.request import FinishReason
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.setup import set_up

from .conftest import until
from .fake_engine import FakeExecutor, make_engine

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class FakeLoader:
    """Loader of fake engines; a load waits halfway until `open` is set, and fails with `error`."""

    open: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    executors: list[FakeExecutor] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.open.set()

    def __call__(self, name: str, progress: Progress) -> EngineService:
        progress(0.5, "Loading weights")
        while not self.open.wait(0.01):
            progress(0.5, "Loading weights")
        if self.error is not None:
            raise self.error
        self.loaded.append(name)
        self.executors.append(FakeExecutor())
        engine = make_engine(self.executors[-1])
        engine.model_name = name
        return EngineService(engine)


async def ask(service: EngineService, max_tokens: int = 3) -> str:
    async with await service.submit(["hello"], SamplingParams(max_tokens=max_tokens)) as generation:
        return await text_of(generation)


async def text_of(generation: Generation) -> str:
    return "".join([output.text async for _, output in generation])


async def test_a_model_is_loaded_beside_a_live_server_and_its_progress_is_told() -> None:
    loader = FakeLoader()
    loader.open.clear()
    host = ModelHost(load=loader, name="alpha")
    told: list[float | None] = []
    host.listeners.append(lambda: told.append(host.loading and host.loading.share))
    await host.start()
    with pytest.raises(ModelLoadingError, match="alpha is being loaded"):
        _ = host.service
    await until(lambda: 0.5 in told)
    loader.open.set()
    await until(lambda: host.loading is None)
    assert told[0] == 0.0
    assert told[-1] is None
    assert await ask(host.service) == "fgh"
    await host.stop()


async def test_another_model_takes_the_place_and_open_requests_are_told() -> None:
    loader = FakeLoader()
    host = ModelHost(load=loader)
    await host.start()
    with pytest.raises(NoModelError, match="load one"):
        _ = host.service
    await host.begin("alpha")
    first = host.service
    loader.executors[0].open.clear()
    async with await first.submit(["hello"], SamplingParams(max_tokens=100)) as generation:
        switching = host.begin("beta")
        loader.executors[0].open.set()
        with pytest.raises(ServiceStoppedError, match="make room"):
            await text_of(generation)
    await switching
    assert host.service.model_name == host.name == "beta"
    with pytest.raises(ServiceStoppedError):
        await first.submit(["hello"], SamplingParams())
    await host.stop()


async def test_only_one_model_is_loaded_at_a_time() -> None:
    loader = FakeLoader()
    loader.open.clear()
    host = ModelHost(load=loader)
    task = host.begin("alpha")
    with pytest.raises(ShelfError, match="alpha is being loaded"):
        host.begin("beta")
    loader.open.set()
    await task
    assert loader.loaded == ["alpha"]
    await host.stop()


@pytest.mark.parametrize("error", [MemoryError("it needs 99 GB"), KeyError("weights")])
async def test_a_failed_load_says_why_and_the_next_one_succeeds(error: Exception) -> None:
    loader = FakeLoader(error=error)
    host = ModelHost(load=loader)
    await host.begin("alpha")
    assert host.error is not None
    assert "alpha could not be loaded" in host.error
    assert str(error) in host.error
    with pytest.raises(NoModelError, match="alpha could not be loaded"):
        _ = host.service
    loader.error = None
    await host.begin("alpha")
    assert host.error is None
    assert await ask(host.service) == "fgh"
    await host.stop()


async def test_an_idle_model_goes_and_the_next_requests_bring_it_back() -> None:
    loader = FakeLoader()
    host = ModelHost(load=loader, name="alpha", idle_unload_s=0.05)
    await host.start()
    await until(lambda: host.is_resting)
    assert host.service.model_name == "alpha"
    services = await asyncio.gather(*(host.ready() for _ in range(5)))
    texts = await asyncio.gather(*map(ask, services))
    assert set(texts) == {"fgh"}
    assert loader.loaded == ["alpha", "alpha"]
    await until(lambda: host.is_resting)
    await host.stop()


async def test_a_busy_model_is_not_idle() -> None:
    loader = FakeLoader()
    host = ModelHost(load=loader, idle_unload_s=0.02)
    await host.begin("alpha")
    loader.executors[0].open.clear()
    async with await host.service.submit(["hello"], SamplingParams(max_tokens=2)) as generation:
        watching = asyncio.create_task(host._watch_idle(0.02))
        await asyncio.sleep(0.2)
        assert not host.is_resting
        loader.executors[0].open.set()
        assert await text_of(generation) == "fg"
    await until(lambda: host.is_resting)
    watching.cancel()
    await host.stop()


async def test_requests_for_a_model_that_does_not_come_back_are_told_why() -> None:
    loader = FakeLoader()
    host = ModelHost(load=loader, name="alpha", idle_unload_s=0.02)
    await host.start()
    await until(lambda: host.is_resting)
    loader.error = MemoryError("another program took the memory")
    with pytest.raises(NoModelError, match="another program took the memory"):
        await host.ready()
    await host.stop()


async def test_weights_and_caches_are_free_after_unloading() -> None:
    watched: list[weakref.ref[object]] = []

    def load(name: str, progress: Progress) -> EngineService:
        parts = set_up(EngineOptions(shape="tiny", gpu_cache_tokens=256, cpu_cache_tokens=256, device="cpu"))
        weights, pools = parts.model.decoder, [parts.storage[place] for place in MEASURED_TIERS]
        watched.extend(map(weakref.ref, (weights.embedding, weights.final_norm, *pools)))
        engine = Engine.from_parts(parts, "neo", cost_model=ZERO)
        return EngineService(engine)

    host = ModelHost(load=load)
    await host.begin("tiny")
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    async with await host.service.submit(["hi"], params) as generation:
        outputs = [output async for _, output in generation]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert all(each() is not None for each in watched)
    await host.unload()
    assert [each() for each in watched] == [None] * 4
    await host.stop()


async def test_health_and_the_api_tell_a_model_that_is_being_loaded() -> None:
    loader = FakeLoader()
    loader.open.clear()
    host = ModelHost(load=loader, name="alpha")
    app = create_app(host)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        await host.start()
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        answer = await client.post("/v1/completions", json={"prompt": "hello"})
        assert answer.status_code == 503
        assert int(answer.headers["Retry-After"]) > 0
        assert answer.json()["error"]["code"] == "model_loading"
        loader.open.set()
        await until(lambda: host.loading is None)
        assert (await client.get("/health")).json() == {"status": "ok", "model": "alpha", "backend": "neo"}
        await host.unload()
        answer = await client.post("/v1/completions", json={"prompt": "hello"})
        assert answer.json()["error"]["code"] == "no_model"
        assert (await client.get("/v1/models")).json()["data"] == []
    await host.stop()
