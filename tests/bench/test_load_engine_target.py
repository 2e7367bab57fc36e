"""The load suite asks the engine for what it says, and leaves nothing in it."""

import asyncio
import gc
import weakref
from typing import Any

import pytest

from neo_desktop import Engine
from neo_desktop.app.bench.load.client import OUT_OF_TIME, ClientRequest, EngineTarget, send_all
from neo_desktop.app.web.limits import ServerLimits


def tiny_engine(**more: Any) -> Engine:
    return Engine.from_pretrained(
        shape="tiny", device="cpu", dtype="float32", policy="gpu-only", gpu_cache_tokens=512, **more
    )


def test_the_engine_answers_with_as_many_tokens_as_asked_for_and_every_prompt_is_new() -> None:
    async def run() -> None:
        target = EngineTarget(tiny_engine())
        await target.start()
        prompts = [target.make_prompt(40) for _ in range(8)]
        assert len({tuple(prompt[:16]) for prompt in prompts}) == 8
        records = await send_all(target, [ClientRequest(0.0, prompt, 5) for prompt in prompts])
        for record in records:
            assert (record.error, record.prompt_tokens, record.output_tokens) == ("", 40, 5)
            assert len(record.chunks_ms) == 5
        await target.close()

    asyncio.run(run())


def test_what_the_engine_cannot_take_is_refused_by_reason() -> None:
    async def run() -> None:
        target = EngineTarget(tiny_engine())
        await target.start()
        sent = [ClientRequest(0.0, target.make_prompt(tokens), 5) for tokens in (600, 20)]
        too_long, fitting = await send_all(target, sent)
        assert "600" in too_long.error
        assert fitting.is_finished
        target._service._limits = ServerLimits(max_queued_requests=4)
        records = await send_all(target, [ClientRequest(0.0, target.make_prompt(20), 5) for _ in range(20)])
        assert len({record.error for record in records if record.error}) == 1
        assert sum(record.is_finished for record in records) >= 4
        await target.close()

    asyncio.run(run())


@pytest.mark.parametrize("way", ["cancelled", "out of time"])
def test_a_run_that_is_given_up_leaves_the_engine_empty(way: str) -> None:
    async def run() -> None:
        engine = tiny_engine()
        target = EngineTarget(engine)
        await target.start()
        sent = [ClientRequest(0.0, target.make_prompt(20), 400) for _ in range(30)]
        if way == "cancelled":
            sending = asyncio.create_task(send_all(target, sent))
            while not target.stats().num_running:
                await asyncio.sleep(0.001)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
        else:
            records = await send_all(target, sent, drain_s=0.01)
            assert OUT_OF_TIME in {record.error for record in records}
        # The answer to the next request comes after all that was given up before it.
        (record,) = await send_all(target, [ClientRequest(0.0, target.make_prompt(5), 1)])
        assert record.is_finished
        stats = target.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert [pool.num_used_blocks for pool in stats.pools.values()] == [0]
        await target.close()

    asyncio.run(run())


def test_closing_the_target_frees_the_model() -> None:
    engine = tiny_engine()
    decoder = weakref.ref(engine._decoder)

    async def run() -> None:
        target = EngineTarget(engine)
        await target.start()
        await target.close()

    asyncio.run(run())
    gc.collect()
    assert decoder() is None
