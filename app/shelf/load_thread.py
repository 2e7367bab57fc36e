"""Loads a model beside the event loop, and gives memory back."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial

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
    done: asyncio.Future[EngineService] = loop.create_future()

    def progress(share: float, what: str) -> None:
        if is_stopped.is_set():
            raise LoadStoppedError
        loop.call_soon_threadsafe(progressed, share, what)

    def run() -> None:
        finish: Callable[[], None]
        try:
            service = load(name, progress)
            if is_stopped.is_set():
                service.close()
                raise LoadStoppedError
            finish = partial(done.set_result, service)
        except Exception as error:
            # The frames of its traceback hold what was loaded.
            known = error.with_traceback(None) if is_expected(error) else error
            finish = partial(done.set_exception, known)
        with contextlib.suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(finish)

    threading.Thread(target=run, name="model loader", daemon=True).start()
    return await done


def release(service: EngineService) -> None:
    service.close()
    return_memory()


def is_expected(error: Exception) -> bool:
    """True if its message was written for people."""
    return isinstance(error, (LoadStoppedError, *EXPECTED))
