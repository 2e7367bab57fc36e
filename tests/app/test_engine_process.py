"""An engine in a child process gives the same outputs as one in a thread, and ends when it should."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from neo_desktop.app.engines.generation import Generation
from neo_desktop.app.engines.messages import EngineMaker
from neo_desktop.app.engines.process import EngineProcess
from neo_desktop.app.engines.service import EngineService
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.errors import ContextLengthError
from neo_desktop.engine.grammar import from_regex
from neo_desktop.engine.progress import Progress
from neo_desktop.engine.sampling_params import SamplingParams

from .conftest import eventually, is_idle
from .fake_engine import CONTEXT_TOKENS, FakeExecutor, make_engine

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def tests_are_found_in_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)


def make(progress: Progress) -> Engine:
    """Make the engine in the child process."""
    progress(0.5, "Loading weights")
    return make_engine(FakeExecutor())


def refuse(progress: Progress) -> Engine:
    raise MemoryError("it needs 99 GB")


def make_builtin(progress: Progress) -> Engine:
    return Engine.from_pretrained(device="cpu", policy="gpu-only", gpu_cache_tokens=4096)


def warn(progress: Progress) -> Engine:
    try:
        _ = 1 // 0
    except ZeroDivisionError:
        logging.getLogger("neo_desktop.child").warning("a %s from the child", "warning", exc_info=True)
    logging.getLogger("neo_desktop.child").debug("unseen")
    return make(progress)


@asynccontextmanager
async def served(make: EngineMaker = make) -> AsyncIterator[EngineService]:
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
        assert (
            str(await service.templates.render([{"role": "user", "content": "hi"}])) == "<user>hi<assistant>"
        )


async def test_a_load_that_fails_in_the_child_says_why() -> None:
    with pytest.raises(MemoryError, match="99 GB"):
        await asyncio.to_thread(EngineProcess.load, refuse, lambda share, what: None)


REQUESTS = [
    SamplingParams(max_tokens=12, temperature=0.0),
    SamplingParams(max_tokens=12, seed=3, n=2, logprobs=2, top_p=0.9),
    SamplingParams(max_tokens=12, seed=4, frequency_penalty=1.0, logit_bias={5: -100.0}, stop=["e"]),
    SamplingParams(max_tokens=40, seed=5, grammar=from_regex("[a-f]{3}-[0-9]{2}")),
    SamplingParams(pooling="mean"),
]


async def outputs_of(service: EngineService, params: SamplingParams) -> list[object]:
    """Return the outputs' comparable fields, in order. The request is alone in its batch."""
    async with await service.submit(["What is a KV cache?"], params) as generation:
        found = [(index, output) async for index, output in generation]
    parts: dict[int, list[object]] = {}
    for index, output in found:
        embedding = None if output.embedding is None else output.embedding.tolist()
        parts.setdefault(index, []).extend([*output.tokens, output.text, output.finish_reason, embedding])
    return [parts[index] for index in sorted(parts)]


async def test_answers_are_those_of_a_thread_grammars_logprobs_and_embeddings_included() -> None:
    async def answers(service: EngineService) -> list[list[object]]:
        return [await outputs_of(service, params) for params in REQUESTS]

    async with served(make_builtin) as service:
        from_process = await answers(service)
    in_thread = EngineService(make_builtin(lambda share, what: None))
    await in_thread.start()
    from_thread = await answers(in_thread)
    await in_thread.stop()
    in_thread.close()
    assert from_process == from_thread


async def test_a_reader_that_leaves_frees_its_blocks_in_the_child() -> None:
    async with served() as service:
        async with await service.submit(["hello"], SamplingParams()) as generation:
            await anext(aiter(generation))
            assert not is_idle(service)
        await asyncio.to_thread(eventually, lambda: is_idle(service))


async def test_what_the_child_logs_is_this_programs_log(caplog: pytest.LogCaptureFixture) -> None:
    async with served(warn):
        pass
    (record,) = [each for each in caplog.records if each.name == "neo_desktop.child"]
    assert record.getMessage().startswith("a warning from the child")
    assert "ZeroDivisionError" in record.getMessage()
    assert record.levelname == "WARNING"


async def test_progress_is_told_and_may_stop_the_load() -> None:
    told: list[tuple[float, str]] = []

    def progress(share: float, what: str) -> None:
        told.append((share, what))
        raise KeyboardInterrupt  # as for Ctrl-C in a terminal

    with pytest.raises(KeyboardInterrupt):
        EngineProcess.load(make, progress)
    assert len(told) == 1
