"""The engine's process: loads a model, then runs the engine's loop between two pipes.

    stdin   how to begin, the maker of the engine, commands; its end: the parent is gone, and the child ends
    stdout  events, log messages

Prints go to stderr in place of both.
"""

import faulthandler
import gc
import logging
import logging.handlers
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from neo_desktop.app.engines.loop import EngineLoop
from neo_desktop.app.engines.messages import EngineFacts, Progressed, portable
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.frames import FrameWriter, read_frames, take_pipes

PROGRESS_S = 0.05  # between two messages of the same kind of progress
FAILED_STATUS = 1


@dataclass(frozen=True, slots=True)
class Beginning:
    """Settings of the parent for the child."""

    sys_path: Sequence[str]
    log_level: int
    limits: Sequence[tuple[str, str, str]]  # of the fallbacks: mechanism, level, reason; told already


def main() -> None:
    """Run until told to stop, or until the parent is gone."""
    faulthandler.enable()  # of a crash, at least the lines of Python are seen
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, who sends a Stop
    commands, events = take_pipes()
    frames, writer = read_frames(commands), _Events(events)
    beginning: Beginning = next(frames)
    sys.path[:] = beginning.sys_path
    logging.disable()
    for mechanism, level, reason in beginning.limits:
        fallbacks.limit(mechanism, level, reason)
    logging.disable(logging.NOTSET)
    handler = logging.handlers.QueueHandler(writer)  # type: ignore[arg-type]  # the parent prints its records
    logging.basicConfig(level=beginning.log_level, format="%(message)s", handlers=[handler], force=True)
    _run(frames, writer)


def _run(frames: Iterator[Any], writer: "_Events") -> None:
    ready: Future[EngineLoop] = Future()
    gc.freeze()  # imported modules stay
    last_s, last_what = 0.0, ""

    def progress(share: float, what: str) -> None:
        nonlocal last_s, last_what
        now_s = time.monotonic()
        if what != last_what or now_s >= last_s + PROGRESS_S:
            last_s, last_what = now_s, what
            writer.put(Progressed(share, what))

    try:
        make = next(frames)
        threading.Thread(target=_read_commands, args=(frames, ready), name="commands", daemon=True).start()
        engine = make(progress)
    except Exception as error:
        if not isinstance(error, ValueError | MemoryError | OSError | RuntimeError):
            logging.getLogger(__name__).exception("the model could not be loaded")
        writer.put(portable(error))
        os._exit(FAILED_STATUS)
    writer.put(EngineFacts.of(engine))
    loop = EngineLoop(engine, writer.put)
    ready.set_result(loop)
    reason = loop.run()
    if reason is None:
        engine.close()  # after anything else it may never return, on a lost device say
    logging.shutdown()
    os._exit(0 if reason is None else FAILED_STATUS)


def _read_commands(frames: Iterator[Any], ready: "Future[Any]") -> None:
    try:
        for command in frames:
            ready.result().send(command)
    finally:
        # The parent is gone, killed perhaps. Its successor may be waiting for the memory.
        os._exit(FAILED_STATUS)


class _Events(FrameWriter):
    """Ends the process when its reader is gone."""

    def put(self, value: object) -> None:
        try:
            super().put(value)
        except OSError:
            os._exit(FAILED_STATUS)

    put_nowait = put  # which handlers of log records call
