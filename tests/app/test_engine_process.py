"""An engine in a process of its own says what one in a thread says, and ends when it should."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from neo_desktop.app.engines.messages import LoadProgress
from neo_desktop.app.engines.process import EngineProcess
from neo_desktop.app.service import EngineService, Generation
from neo_desktop.engine.engine import ContextLengthError, Engine
from neo_desktop.engine.sampling_params import SamplingParams

from .fake_engine import CONTEXT_TOKENS, FakeExecutor, make_engine

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def tests_are_found_in_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)


def make(progress: LoadProgress) -> Engine:
    """What is made in the child."""
    progress(0.5, "Loading weights")
    return make_engine(FakeExecutor())


def refuse(progress: LoadProgress) -> Engine:
    raise MemoryError("it needs 99 GB")


@asynccontextmanager
async def served() -> AsyncIterator[EngineService]:
    process = await asyncio.to_thread(EngineProcess.load, make, lambda share, what: None)
    service = EngineService(process)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()
        await asyncio.to_thread(service.close)
        assert process._process.poll() is not None


async def text_of(generation: Generation) -> str:
    async with generation:
        return "".join([output.text async for _, output in generation])


async def test_requests_are_answered_or_refused_as_by_a_thread() -> None:
    async with served() as service:
        assert await text_of(await service.submit(["hello"], SamplingParams(max_tokens=3))) == "fgh"
        with pytest.raises(ContextLengthError, match="shorten"):
            await service.submit([[1] * CONTEXT_TOKENS], SamplingParams())
        with pytest.raises(ValueError, match="grammar cannot be used"):
            await service.submit(["hello"], SamplingParams(grammar="start: missing"))
        view = await service.live_view()
        assert view.stats.num_output_tokens >= 3
        assert (await service.render_chat([{"role": "user", "content": "hi"}])) == "<user>hi<assistant>"


async def test_a_load_that_fails_in_the_child_says_why() -> None:
    with pytest.raises(MemoryError, match="99 GB"):
        await asyncio.to_thread(EngineProcess.load, refuse, lambda share, what: None)
