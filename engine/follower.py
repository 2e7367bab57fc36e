"""The process of a rank other than 0: it loads its part of a model and executes the plans of rank 0.

`execute.ranks.members` has a drawing of the messages.
"""

import faulthandler
import logging
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

from neo_desktop.engine.execute.ranks.driver import share_cpus
from neo_desktop.engine.execute.ranks.group import BrokenGroupError
from neo_desktop.engine.execute.ranks.members import Beginning, Follower
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.frames import FrameWriter, read_frames, take_pipes
from neo_desktop.engine.loading import load
from neo_desktop.engine.setup import runner_of, take_memory

FAILED_STATUS = 1


def main() -> None:
    """Run until rank 0 is gone."""
    faulthandler.enable()  # on a crash, print at least the Python stack
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C and closes the pipe
    commands, events = take_pipes()
    frames, writer = read_frames(commands), FrameWriter(events)
    beginning: Beginning = next(frames)
    sys.path[:] = beginning.sys_path
    logging.basicConfig(level=beginning.log_level, format="%(message)s", force=True)
    for mechanism, level, reason in beginning.limits:
        fallbacks.limit(mechanism, level, reason)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(frames, messages), name="messages", daemon=True).start()
    try:
        _follow(beginning, Follower(beginning, iter(messages.get, None), writer))
    except BrokenGroupError:  # another rank is the cause
        os._exit(FAILED_STATUS)
    except Exception as error:
        if not isinstance(error, (MemoryError, ValueError)):  # their messages are complete
            traceback.print_exc()  # rank 0 shows the output with its own error
        writer.put(_portable(error))
        os._exit(FAILED_STATUS)


def _listen(frames: Iterator[Any], messages: "queue.SimpleQueue[Any]") -> None:
    """Forward messages; exit when rank 0 is gone, because running work can never finish then."""
    try:
        for message in frames:
            messages.put(message)
    finally:
        os._exit(0)


def _follow(beginning: Beginning, follower: Follower) -> None:
    share_cpus(beginning.rank.count)
    options = beginning.options
    parts = take_memory(load(options, rank=beginning.rank), options, member=follower)
    executor = runner_of(parts, None, follower.group)
    follower.exchange(True, all)
    for message in follower.messages:
        if isinstance(message, int):  # a question
            follower.tell(message)
        else:
            executor.execute(message)


def _portable(error: Exception) -> Exception:
    """Return the error as a type that loading raises, so that rank 0 can raise it."""
    for kind in (MemoryError, ValueError):
        if isinstance(error, kind):
            return kind(str(error))
    return RuntimeError(str(error) or type(error).__name__)
