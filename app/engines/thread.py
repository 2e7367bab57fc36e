"""An engine in a thread of this process."""

import threading

from neo_desktop.app.engines.loop import EngineLoop
from neo_desktop.app.engines.messages import Command, EngineFacts, Receiver, ServedEngine


class EngineThread:
    """A way to an engine that belongs to a thread, from `start` to the thread's end; see `EngineProcess`."""

    is_process = False
    timeout_s: float | None = None  # it could not be ended anyway

    def __init__(self, engine: ServedEngine) -> None:
        self.facts = EngineFacts.of(engine)
        self._engine = engine
        self._loop: EngineLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self, receive: Receiver) -> None:
        self._loop = EngineLoop(self._engine, receive)
        self._thread = threading.Thread(target=self._loop.run, name="engine", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        assert self._loop is not None
        self._loop.take(command)

    def kill(self, reason: str) -> None:
        """A thread cannot be ended: does nothing."""

    def close(self) -> None:
        if self._thread is not None:
            assert self._loop is not None
            if self._loop.is_over:
                self._thread.join()
            if self._thread.is_alive():
                return
        self._engine.close()
