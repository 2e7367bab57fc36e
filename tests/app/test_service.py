"""The service between the event loop and the engine's thread."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
from kv_invariants import check_kv
from seeds import seeds

from neo_desktop.app.engines.generation import Generation
from neo_desktop.app.engines.service import SHORT_PROMPTS, EngineService
from neo_desktop.app.errors import (
    EngineFailedError,
    ServiceError,
    ServiceStoppedError,
)
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.sampling_params import SamplingParams

from .conftest import is_idle, until
from .fake_engine import FakeExecutor, make_engine


@asynccontextmanager
async def started(engine: Engine, max_queued_requests: int = 64) -> AsyncIterator[EngineService]:
    service = EngineService(engine)
    service.max_queued_requests = max_queued_requests
    await service.start()
    try:
        yield service
    finally:
        cast("FakeExecutor", engine.executor).open.set()
        await service.stop()


async def collect(generation: Generation) -> dict[int, str]:
    texts: Counter[int] = Counter()
    parts: dict[int, list[str]] = {}
    async with generation:
        async for index, output in generation:
            parts.setdefault(index, []).append(output.text)
            texts[index] += len(output.tokens)
    return {index: "".join(pieces) for index, pieces in sorted(parts.items())}


def letters(prompt_tokens: int, count: int, shift: int = 0) -> str:
    return "".join(chr(ord("a") + (prompt_tokens + i + shift) % 26) for i in range(count))


def test_each_prompt_and_choice_gets_its_own_output(executor: FakeExecutor) -> None:
    async def scenario() -> dict[int, str]:
        async with started(make_engine(executor)) as service:
            params = SamplingParams(max_tokens=4, n=2, seed=0)
            return await collect(await service.submit(["xx", [1, 2, 3]], params))

    assert asyncio.run(scenario()) == {
        0: letters(2, 4),
        1: letters(2, 4, 1),
        2: letters(3, 4),
        3: letters(3, 4, 1),
    }


def test_ten_thousand_requests_are_each_answered_or_refused(executor: FakeExecutor) -> None:
    async def one(service: EngineService, prompt: list[int]) -> str:
        try:
            generation = await service.submit([prompt], SamplingParams(max_tokens=3))
        except ServiceError as error:
            return str(error.code)
        return (await collect(generation))[0]

    async def scenario() -> None:
        engine = make_engine(executor)
        async with started(engine, max_queued_requests=1024) as service:
            executor.open.clear()
            prompts = [[number % 256] * (1 + number % 7) for number in range(10_000)]
            answers = [asyncio.create_task(one(service, prompt)) for prompt in prompts]
            await asyncio.sleep(0)
            executor.open.set()
            results = await asyncio.gather(*answers)
            assert Counter(result == "queue_full" for result in results) == {True: 10_000 - 1024, False: 1024}
            for prompt, result in zip(prompts, results, strict=True):
                assert result in ("queue_full", letters(len(prompt), 3))
            await until(lambda: is_idle(service))
            check_kv(engine._kv_cache)
            assert (await collect(await service.submit(["after"], SamplingParams(max_tokens=2))))[0]

    asyncio.run(scenario())


def test_a_place_in_the_queue_is_free_again_after_the_first_token_or_the_end(executor: FakeExecutor) -> None:
    async def scenario() -> None:
        async with started(make_engine(executor), max_queued_requests=2) as service:
            executor.open.clear()
            first = await service.submit([[1]], SamplingParams(max_tokens=400))
            second = asyncio.create_task(collect(await service.submit([[2]], SamplingParams())))
            await asyncio.sleep(0)
            with pytest.raises(ServiceError, match="try again later"):
                await service.submit([[3]], SamplingParams())
            second.cancel()
            await asyncio.wait([second])
            third = asyncio.create_task(service.submit([[3]], SamplingParams(max_tokens=1)))
            await asyncio.sleep(0)
            executor.open.set()
            async with first:
                async for _ in first:
                    break
                await collect(await third)
                await collect(await service.submit([[4], [5]], SamplingParams(max_tokens=1)))
            with pytest.raises(ValueError, match="fewer prompts"):
                await service.submit([[1]] * 3, SamplingParams())

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", seeds(2, 3))
def test_readers_that_leave_at_random_leak_nothing(executor: FakeExecutor, seed: int) -> None:
    random_source = random.Random(seed)

    async def reader(service: EngineService, length: int, timeout: int) -> None:
        params = SamplingParams(max_tokens=40, n=random_source.choice([1, 1, 3]))
        async with await service.submit([[length] * length], params) as generation:
            async for _ in generation:
                timeout -= 1
                if timeout == 0:
                    return

    async def scenario() -> None:
        engine = make_engine(executor, num_blocks=40)  # few blocks, so that requests are preempted
        async with started(engine, max_queued_requests=1000) as service:
            readers = [
                asyncio.create_task(
                    reader(service, random_source.randint(1, 90), random_source.randint(1, 60))
                )
                for _ in range(150)
            ]
            for victim in random_source.sample(readers, 50):
                await asyncio.sleep(0.001 * random_source.random())
                victim.cancel()
            results = await asyncio.gather(*readers, return_exceptions=True)
            assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
            await until(lambda: is_idle(service))
            check_kv(engine._kv_cache)

    asyncio.run(scenario())


def test_a_failed_iteration_ends_its_requests_and_no_others(executor: FakeExecutor) -> None:
    async def scenario() -> None:
        async with started(make_engine(executor)) as service:
            executor.error = RuntimeError("out of memory")
            with pytest.raises(EngineFailedError, match="out of memory"):
                await collect(await service.submit([[1]], SamplingParams()))
            executor.error = None
            assert await collect(await service.submit([[1]], SamplingParams(max_tokens=2))) == {
                0: letters(1, 2)
            }
            await until(lambda: is_idle(service))

    asyncio.run(scenario())


def test_a_defect_in_the_engine_is_told_to_everybody(
    executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        engine = make_engine(executor)
        async with started(engine) as service:
            executor.open.clear()
            first = await service.submit([[0]], SamplingParams())
            others = [asyncio.create_task(service.submit([[number]], SamplingParams())) for number in (1, 2)]
            await until(executor.begun.is_set)
            monkeypatch.setattr(engine, "launch", lambda: 1 // 0)
            executor.open.set()
            for generation in (first, *[await other for other in others]):
                with pytest.raises(EngineFailedError, match="restart"):
                    await collect(generation)
            with pytest.raises(EngineFailedError, match="restart"):
                await service.submit([[1]], SamplingParams())

    asyncio.run(scenario())


def test_stopping_tells_all_requests_and_frees_their_blocks(executor: FakeExecutor) -> None:
    async def scenario() -> None:
        engine = make_engine(executor)
        service = EngineService(engine)
        with pytest.raises(ServiceStoppedError, match="not been started"):
            await service.submit([[1]], SamplingParams())
        await service.start()
        executor.open.clear()
        running = await service.submit([[1]], SamplingParams())
        await until(executor.begun.is_set)
        waiting = await service.submit([[2]], SamplingParams())
        stopping = asyncio.create_task(service.stop())
        for told in (collect(running), collect(waiting), service.submit([[3]], SamplingParams())):
            with pytest.raises(ServiceStoppedError, match="shutting down"):
                await told
        executor.open.set()
        await stopping
        await service.stop()
        assert is_idle(service)
        assert not engine.has_work

    asyncio.run(scenario())


def test_tokenising_does_not_hold_the_event_loop_up(
    executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        engine = make_engine(executor)
        is_tokenising, may_go_on = threading.Event(), threading.Event()

        def slow_encode(text: str, add_special_tokens: bool = True) -> list[int]:
            is_tokenising.set()
            assert may_go_on.wait(30)
            return [1, 2]

        monkeypatch.setattr(engine.tokenizer, "encode", slow_encode)
        async with started(engine) as service:
            slow = asyncio.create_task(
                service.submit(["x" * (SHORT_PROMPTS + 1)], SamplingParams(max_tokens=1))
            )
            await until(is_tokenising.is_set)
            assert await collect(await service.submit([[1]], SamplingParams(max_tokens=1)))
            assert not slow.done()
            may_go_on.set()
            assert await collect(await slow) == {0: letters(2, 1)}

    asyncio.run(scenario())


def test_embeddings_come_in_the_order_of_the_prompts() -> None:
    """The built-in model embeds the prompts beside a stream."""
    prompts = ["one", "another one", "one"]

    async def scenario(engine: Engine) -> tuple[list[tuple[list[float], int]], int]:
        service = EngineService(engine)
        await service.start()
        async with await service.submit(["Hello"], SamplingParams(max_tokens=20)) as stream:
            found = await service.embed(prompts, "mean")
            last = [output async for _, output in stream][-1]
        await service.stop()
        return found, last.num_output_tokens

    with Engine.from_pretrained(device="cpu", policy="gpu-only", gpu_cache_tokens=4096) as engine:
        expected = engine.embed(prompts, "mean")
        found, num_output_tokens = asyncio.run(scenario(engine))
        assert num_output_tokens > 0
        for (embedding, num_tokens), wanted, text in zip(found, expected, prompts, strict=True):
            assert embedding == pytest.approx(wanted.tolist(), abs=1e-5)
            assert num_tokens == len(engine.tokenizer.encode(text))


def test_a_request_that_took_too_long_to_prepare_is_not_begun(
    executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        engine = make_engine(executor)
        may_go_on = threading.Event()

        def slow_encode(text: str, add_special_tokens: bool = True) -> list[int]:
            assert may_go_on.wait(30)
            return [1, 2]

        monkeypatch.setattr(engine.tokenizer, "encode", slow_encode)
        service = EngineService(engine, request_timeout_s=0.01)
        await service.start()
        slow = asyncio.create_task(service.submit(["x" * (SHORT_PROMPTS + 1)], SamplingParams()))
        await asyncio.sleep(0.05)
        may_go_on.set()
        with pytest.raises(ServiceError, match=r"0\.01 s") as caught:
            await slow
        assert caught.value.code == "timeout"
        await until(lambda: is_idle(service))
        await service.stop()
        assert not executor.prompts

    asyncio.run(scenario())
