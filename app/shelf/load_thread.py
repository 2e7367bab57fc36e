"""Loads a model beside the event loop, and gives memory back."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.words import EXPECTED
from neo_desktop.engine.progress import Progress
from neo_desktop.engine.unused_memory import return_memory

Loader = Callable[[str, Progress], EngineService]  # by a model's name; called in a thread of its own


class LoadStoppedError(Exception):
    """Ends the loader: the model is not wanted any more."""


async def load_in_thread(
    name: str, load: Loader, progressed: Progress, is_stopped: threading.Event
) -> EngineService:
    """Load in a thread that the program's end need not wait for.

    `progressed` is called on the event loop. Raises what `load` raises, and LoadStoppedError once
    `is_stopped` is set.
    """
    loop = asyncio.get_running_loop()
    done: Future[EngineService] = Future()

    def progress(share: float, what: str) -> None:
        if is_stopped.is_set():
            raise LoadStoppedError
        loop.call_soon_threadsafe(progressed, share, what)

    def run() -> None:
        done.set_running_or_notify_cancel()
        try:
            service = load(name, progress)
            if is_stopped.is_set():
                service.close()
                raise LoadStoppedError
            done.set_result(service)
        except Exception as error:
            # The frames of its traceback hold what was loaded.
            done.set_exception(error.with_traceback(None) if is_expected(error) else error)

    threading.Thread(target=run, name="model loader", daemon=True).start()
    return await asyncio.wrap_future(done)


def release(service: EngineService) -> None:
    service.close()
    return_memory()


def is_expected(error: Exception) -> bool:
    """True if its message was written for people."""
    return isinstance(error, (LoadStoppedError, *EXPECTED))
