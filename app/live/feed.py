"""Asks the engine for its present work, at most once a second, and only for a viewer."""

import asyncio
import time
from dataclasses import dataclass
from enum import StrEnum

from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.errors import NoModelError, ServiceError
from neo_desktop.app.live import words
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.engine.live import LiveView

PERIOD_S = 1.0  # between two looks
TIMEOUT_S = 1.0  # for an answer; then the last one is shown again, with its age
RESTING = (
    "The model rests: nobody asked it anything for a while, so it gave its memory back. "
    "The next question loads it again."
)


class EngineState(StrEnum):
    NO_MODEL = "no-model"  # none is loaded, or one is being loaded
    RESTING = "resting"  # the unused model gave its memory back
    IDLE = "idle"
    WORKING = "working"
    STOPPED = "stopped"  # the engine ended, or failed


@dataclass(frozen=True, slots=True)
class EngineView:
    """The engine's state in one sentence; `live` is None where no engine can be asked."""

    state: EngineState
    sentence: str
    live: LiveView | None = None
    age_s: float = 0.0  # an engine answers between two iterations


class EngineFeed:
    """The engine's view of itself; belongs to the event loop."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host
        self._forget(None)

    def _forget(self, service: EngineService | None) -> None:
        self._service = service  # whom the rest is of
        self._asked: asyncio.Task[LiveView] | None = None
        self._seen: LiveView | None = None
        self._seen_s = float("-inf")

    async def view(self) -> EngineView:
        """Return what the engine does; asked again within a second, the same."""
        try:
            service = self._host.service
        except NoModelError as reason:
            return EngineView(EngineState.NO_MODEL, _sentence(reason))
        if self._host.is_resting:
            return EngineView(EngineState.RESTING, RESTING)
        if service is not self._service:
            self._forget(service)
        try:
            await self._look(service)
        except ServiceError as reason:
            return EngineView(EngineState.STOPPED, _sentence(reason))
        if self._seen is None:
            reason_text = "The engine is busy with a long piece of work and has not answered yet."
            return EngineView(EngineState.WORKING, reason_text)
        is_idle = not self._seen.requests and self._seen.stats.num_waiting == 0
        state = EngineState.IDLE if is_idle else EngineState.WORKING
        age_s = max(time.monotonic() - self._seen_s, 0.0)
        return EngineView(state, words.sentence(self._seen), self._seen, age_s)

    async def _look(self, service: EngineService) -> None:
        if self._asked is None:
            if time.monotonic() - self._seen_s < PERIOD_S / 2:
                return
            self._asked = asyncio.create_task(service.live_view())
            # asyncio logs an error that is never read: the engine may have ended meanwhile.
            self._asked.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        asked = self._asked
        await asyncio.wait([asked], timeout=TIMEOUT_S)
        if asked.done() and asked is self._asked:
            self._asked = None
            self._seen, self._seen_s = asked.result(), time.monotonic()


def _sentence(reason: Exception) -> str:
    text = str(reason)
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
