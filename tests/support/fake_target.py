"""A target for the load suite's client that answers when and as the test wants."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, fields

from neo_desktop.app.bench.load.client import Usage
from neo_desktop.engine.stats import EngineStats


@dataclass
class FakeTarget:
    """Answers in `max_tokens` chunks, `gap_s` apart, once `gate` is open; the prompt numbered n is "n".

    `began` collects the prompts, `open` holds those whose stream has not been left.
    """

    gate: asyncio.Event | None = None  # None: always open
    gap_s: float = 0.0
    errors: Mapping[str, Exception] = field(default_factory=dict)  # by prompt
    began: list[str] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    num_prompts: int = 0
    num_closed: int = 0

    @property
    def model(self) -> str:
        return "fake"

    async def start(self) -> None:
        pass

    def make_prompt(self, tokens: int) -> str:
        self.num_prompts += 1
        return str(self.num_prompts)

    async def stream(self, prompt: str, max_tokens: int) -> AsyncGenerator[Usage | None]:
        self.began.append(prompt)
        self.open.add(prompt)
        try:
            if prompt in self.errors:
                raise self.errors[prompt]
            if self.gate is not None:
                await self.gate.wait()
            for _ in range(max_tokens):
                await asyncio.sleep(self.gap_s)
                yield None
            yield Usage(7, max_tokens)
        finally:
            self.open.discard(prompt)

    def stats(self) -> EngineStats:
        counters = dict.fromkeys((field.name for field in fields(EngineStats)), 0)
        return EngineStats(**counters)

    async def close(self) -> None:
        self.num_closed += 1
