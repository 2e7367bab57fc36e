"""An engine in a child process whose GPU dies: the next process answers, with the right tokens."""

import asyncio
from pathlib import Path

import pytest
from imitated_device import needs_imitated_gpu
from tiny_engine import PARAMS, PROMPTS, DyingAtFirst, engine, tokens_of

from neo_desktop.app.engines.process import EngineProcess
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.errors import EngineRestartingError
from neo_desktop.app.shelf import restarts
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.engine.progress import Progress

pytestmark = needs_imitated_gpu
TIMEOUT_S = 240


async def answer(service: EngineService) -> list[tuple[int, ...]]:
    """Generate for all prompts at once."""
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    async with await service.submit(PROMPTS, PARAMS) as generation:
        async for index, output in generation:
            tokens[index] += [token.token_id for token in output.tokens]
    return [tuple(each) for each in tokens]


@pytest.mark.parametrize("policy", ["gpu-only", "fastdecode"])
@pytest.mark.parametrize("operation", [1, 150])
def test_an_engine_whose_gpu_dies_is_started_again_and_answers(
    policy: str, operation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "PAUSES_S", (0.0, 0.0, 0.0))
    make = DyingAtFirst(policy, operation, tmp_path / "loads")

    def load(name: str, progress: Progress) -> EngineService:
        return EngineService(EngineProcess.load(make, progress))

    async def meet_it() -> list[tuple[int, ...]]:
        host = ModelHost(load=load)
        async with asyncio.timeout(TIMEOUT_S):
            await host.begin("tiny")
            with pytest.raises(EngineRestartingError, match=r"illegal memory access.*started again"):
                await answer(host.service)
            while host.loading is not None:
                await asyncio.sleep(0.01)
            tokens = await answer(host.service)
            await host.stop()
        return tokens

    with engine("gpu-only", device="cpu") as on_cpu:
        expected = tokens_of(on_cpu)
    assert asyncio.run(meet_it()) == expected
    assert make.loads.read_text().count("a load") == 2
