"""The loop that owns an engine: commands in, steps while requests exist, events out.

    send(command) ──→ inbox ──→  while it has work:   engine.collect()     the iteration under way.
      any thread                                      run the commands
                                                      engine.launch()      the next one.
                       emit() ←─ one list of events per iteration, one per batch of commands

The same loop runs in a thread of this process and in a process of its own.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from neo_desktop.app.engines import messages as msg
from neo_desktop.engine.cuda.errors import is_lost
from neo_desktop.engine.request import FinishReason, RequestOutput

logger = logging.getLogger(__name__)

ADVICE = ": start the engine again"  # with which the engine ends its sentence of a lost GPU
REST_S = 1.0  # between two calls of `rest` without work
MAX_HELPERS = 8  # threads that make grammars ready and read images


class EngineLoop:
    """Carries out commands; only `run` calls the engine, except its grammars and its vision.

    The engine is the loop's alone until `run` has returned. `emit` takes events, from any thread.
    """

    def __init__(self, engine: msg.ServedEngine, emit: Callable[[Sequence[msg.Event]], object]) -> None:
        self.is_over = False  # the engine is not called any more
        self._engine = engine
        self._emit = emit
        self._inbox: queue.SimpleQueue[msg.Command] = queue.SimpleQueue()
        self._is_stopping = False  # run's own
        self._helpers = ThreadPoolExecutor(MAX_HELPERS, "helper")
        engine.watch(lambda: self._inbox.put(msg.Check()))

    def send(self, command: msg.Command) -> None:
        """Have a command carried out; any thread may ask."""
        if not isinstance(command, msg.Compile | msg.See):
            self._inbox.put(command)
        elif not self.is_over:
            self._helpers.submit(self._help, command)

    def run(self) -> str | None:
        """Work until a `Stop`; return why it ended, if it was for anything else."""
        reason = None
        try:
            while not self._is_stopping:
                self._run_commands(wait=not self._engine.has_work)
                if self._engine.has_work and not self._is_stopping:
                    self._step()
        except Exception as error:
            # A failed iteration is the engine's own business (it ends the requests concerned). What comes
            # up to here is a defect, or a lost device, after which no state can be trusted.
            logger.exception("the engine stopped")
            reason = _ended(error)
        self.is_over = True
        self._helpers.shutdown(wait=False, cancel_futures=True)
        self._emit([msg.Ended(reason)])
        return reason

    def _run_commands(self, wait: bool = False) -> None:
        """Run all commands that came in; `wait` for one if there are none."""
        answers: list[msg.Event] = []
        refused: list[RequestOutput] = []
        has_run = False
        while not self._is_stopping:
            try:
                command = self._inbox.get(block=wait, timeout=REST_S)
            except queue.Empty:
                has_run = has_run or (wait and self._engine.rest())
                break
            wait, has_run = False, True
            match command:
                case msg.Add():
                    refused += self._add(command)
                case msg.Abort():
                    self._engine.abort(command.request_id)
                case msg.Check():
                    self._engine.check()
                case msg.Look():
                    answers.append(msg.Answered(command.ticket, self._engine.live_view()))
                case msg.Stop():
                    self._is_stopping = True
        if has_run:
            self._emit([*answers, msg.Gained(refused, self._engine.stats())])

    def _add(self, command: msg.Add) -> list[RequestOutput]:
        try:
            for request_id, prepared in zip(command.request_ids, command.prepared, strict=True):
                self._engine.add(request_id, prepared)
        except Exception as error:  # prompts have been checked, so it is a defect, of this request alone
            logger.exception("a request could not be queued")
            for request_id in command.request_ids:
                self._engine.abort(request_id)
            reason = f"the request could not be queued ({error})"
            return [
                RequestOutput(request_id, 0, "", (), FinishReason.ERROR, reason, 0, 0, 0)
                for request_id in command.request_ids
            ]
        return []

    def _step(self) -> None:
        """End an iteration and start the next one, of which requests that came in meanwhile are part."""
        begun_s = time.perf_counter()
        self._engine.collect()
        self._run_commands()
        self._engine.launch()
        outputs = self._engine.take_outputs()
        self._emit([msg.Gained(outputs, self._engine.stats(), time.perf_counter() - begun_s)])

    def _help(self, command: msg.Compile | msg.See) -> None:
        error = value = None
        try:
            if isinstance(command, msg.Compile):
                self._engine.grammars.compile(command.grammar)
            elif self._engine.vision is None:
                raise ValueError(self._engine.blindness)
            else:
                value = self._engine.vision.see(command.data)
        except Exception as refused:
            if not isinstance(refused, ValueError):  # it is not the caller's fault
                logger.error("a request could not be taken", exc_info=refused)
            error = msg.portable(refused)
        self._emit([msg.Answered(command.ticket, value, error)])


class EngineThread(EngineLoop):
    """A way to an engine that belongs to a thread, from `start` to the thread's end; see `EngineProcess`."""

    is_process = False
    timeout_s: float | None = None  # it could not be ended anyway

    def __init__(self, engine: msg.ServedEngine) -> None:
        super().__init__(engine, lambda events: None)  # until `start`
        self.facts = msg.EngineFacts.of(engine)
        self._thread = threading.Thread(target=self.run, name="engine", daemon=True)

    def start(self, receive: msg.Receiver) -> None:
        self._emit = receive
        self._thread.start()

    def kill(self, reason: str) -> None:
        """A thread cannot be ended: does nothing."""

    def close(self) -> None:
        if self.is_over:
            self._thread.join()
        if not self._thread.is_alive():
            self._engine.close()


def _ended(error: Exception) -> str:
    said = str(error).strip().partition("\n")[0] or type(error).__name__
    if is_lost(error):
        # The advice is left out: the caller knows what happens next, and says it.
        return f"the engine stopped: {said.partition(ADVICE)[0]}"
    return f"the engine stopped because of an internal error ({said})"
