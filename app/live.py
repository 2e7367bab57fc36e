"""The engine's present work for the page: asked for at most once a second, and told in sentences."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.errors import NoModelError, ServiceError
from neo_desktop.app.llamacpp.choice import LLAMACPP_NOTE
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.engine.live import LiveView
from neo_desktop.engine.stats import LLAMACPP

PERIOD_S = 1.0  # between two looks
TIMEOUT_S = 1.0  # wait for the engine's view; after it, the page shows the previous one with its age
IMITATED = "neo-desktop uses no GPU on this computer: the GPU's part is imitated on the CPU."
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
        self._service = service  # gave the values below
        self._asked: asyncio.Task[LiveView] | None = None
        self._seen: LiveView | None = None
        self._seen_s = float("-inf")

    async def view(self) -> EngineView:
        """Return what the engine does; asked again within a second, the same."""
        try:
            service = self._host.service
        except NoModelError as reason:
            return EngineView(EngineState.NO_MODEL, _told(reason))
        if self._host.is_resting:
            return EngineView(EngineState.RESTING, RESTING)
        if service is not self._service:
            self._forget(service)
        try:
            await self._look(service)
        except ServiceError as reason:
            return EngineView(EngineState.STOPPED, _told(reason))
        if self._seen is None:
            reason_text = "The engine is busy with a long piece of work and has not answered yet."
            return EngineView(EngineState.WORKING, reason_text)
        is_idle = not self._seen.requests and self._seen.stats.num_waiting == 0
        state = EngineState.IDLE if is_idle else EngineState.WORKING
        age_s = max(time.monotonic() - self._seen_s, 0.0)
        return EngineView(state, sentence(self._seen), self._seen, age_s)

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


def _told(reason: Exception) -> str:
    text = str(reason)
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def sentence(view: LiveView) -> str:
    """Say where the memory of chats is, and what GPU memory alone would allow."""
    num, num_waiting = len(view.requests), view.stats.num_waiting
    if num + num_waiting == 0:
        return f"No chat is waiting for an answer. {_room(view)}"
    parts = []
    if num and view.stats.backend == LLAMACPP:
        parts.append("1 chat is being answered.")
    elif num:
        parts += _running(view)
    if num_waiting:
        parts.append(f"{_chats(num_waiting)} {'waits' if num_waiting == 1 else 'wait'} for room.")
    if behind := sum(request.is_held for request in view.requests):
        parts.append(f"The CPU has more to do than fits beside the GPU's work: {_chats(behind)} must wait.")
    return " ".join(parts)


def _running(view: LiveView) -> Iterator[str]:
    num, num_alone = len(view.requests), view.num_gpu_alone
    num_workers = sum(request.tier.is_remote for request in view.requests)
    num_cpu = sum(request.tier.in_host_memory for request in view.requests) - num_workers
    places = {
        f"on {_gpu(view)}": num - num_cpu - num_workers,
        "in main memory, where the CPU attends": num_cpu,
        "on workers, which attend": num_workers,
    }
    where = ", ".join(f"{count} {place}" for place, count in places.items() if count)
    yield f"{_chats(num)} at once: {where}." if num > 1 else f"1 chat: {where.removeprefix('1 ')}."
    if not num_cpu and not num_workers:
        yield "Nothing is offloaded."
    elif num_alone is not None and num_alone < num:
        yield f"GPU memory alone would hold {num_alone or 'none'}."
    elif num_alone is not None:
        yield "GPU memory alone would hold all."


def notes(view: LiveView) -> list[str]:
    if view.stats.backend == LLAMACPP:
        return [LLAMACPP_NOTE]
    return [*([IMITATED] if view.is_gpu_imitated else []), *_given_back(view), *_of_workers(view)]


def _given_back(view: LiveView) -> list[str]:
    """Name the shrunken caches, each in a sentence."""
    return [
        f"Other programs need main memory: the {tier.title} has room for "
        f"{pool.num_blocks * view.stats.block_size:,} tokens for now, and gave back that of "
        f"{pool.num_given_back_blocks * view.stats.block_size:,}."
        for tier, pool in view.stats.pools.items()
        if pool.num_given_back_blocks
    ]


def _of_workers(view: LiveView) -> list[str]:
    said = []
    for tier, state in view.workers.items():
        num = sum(request.tier == tier for request in view.requests)
        tokens = view.stats.pools[tier].num_blocks * view.stats.block_size
        does = f"attends for {_chats(num)}" if num else "is there"
        state_now = f"{does}; it has room for {tokens:,} tokens"
        if state.lost is not None:
            again = "its chats are computed again elsewhere, and it is used again as soon as it answers"
            state_now = f"is lost ({state.lost}): {again}"
        said.append(f"{tier} at {state.address} {state_now}.")
    return said


def _chats(count: int) -> str:
    return f"{count} chat{'s' * (count != 1)}"


def _gpu(view: LiveView) -> str:
    return "the imitated GPU" if view.is_gpu_imitated else "the GPU"


def _room(view: LiveView) -> str:
    gpu, cpu = (view.capacity_tokens(in_host) for in_host in (False, True))
    on_gpu, on_cpu = f"{gpu:,} tokens on {_gpu(view)}", f"{cpu:,} in main memory"
    if gpu and cpu:
        return f"There is room for {on_gpu} and {on_cpu}."
    return f"There is room for {on_gpu}." if gpu else f"There is room for {cpu:,} tokens in main memory."
