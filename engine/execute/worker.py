"""A thread that carries out calls in order, and never blocks the end of the program."""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

END_TIMEOUT_S = 5.0  # for threads still at work when the program ends

_Call = tuple[Future[None], Callable[[], object]]
_Calls = queue.SimpleQueue[_Call | None]  # None: end the thread

# Every thread's queue.
_calls: weakref.WeakKeyDictionary[threading.Thread, _Calls] = weakref.WeakKeyDictionary()


class Worker:
    """A thread that exists from the first call until `stop`, and sleeps without calls.

    A call that never ends blocks only its own thread. Python cannot end the thread, but `join` and the end of
    the program wait for it with a timeout. The thread also ends when the worker is garbage-collected.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: _Calls = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_stopped = False
        weakref.finalize(self, self._calls.put, None)

    def submit(self, call: Callable[[], object]) -> Future[None]:
        """Carry out a call after all earlier ones.

        Raises:
            RuntimeError: The worker was stopped.
        """
        future: Future[None] = Future()
        with self._lock:
            if self._is_stopped:
                raise RuntimeError(f"the thread {self._name} was stopped and takes no more work")
            self._calls.put((future, call))
            if self._thread is None:
                # A daemon thread does not keep the program from ending.
                self._thread = threading.Thread(
                    target=_serve, args=(self._calls,), name=self._name, daemon=True
                )
                _calls[self._thread] = self._calls
                self._thread.start()
        return future

    def stop(self) -> None:
        """Drop calls that have not begun, and accept no more; does not block."""
        with self._lock:
            self._is_stopped = True
        _drop(self._calls)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread after `stop`; return False on a timeout."""
        thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()


def has_ended(call: Future[None], timeout_s: float) -> bool:
    """Wait until a call has ended, failed or been cancelled; return False on a timeout."""
    try:
        call.exception(timeout_s)
    except TimeoutError:
        return call.done()
    except CancelledError:
        pass
    return True


def _serve(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        _carry_out(*call)
        del call  # it may refer to the worker and would keep it alive


def _carry_out(future: Future[None], call: Callable[[], object]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        call()
    except BaseException as error:  # the wait for the call raises it
        future.set_exception(error)
    else:
        future.set_result(None)


def _drop(calls: _Calls) -> None:
    """Cancel calls that have not begun, and let the thread end."""
    try:
        while True:
            if (call := calls.get_nowait()) is not None:
                call[0].cancel()
    except queue.Empty:
        calls.put(None)


@atexit.register
def _end_all() -> None:
    """Wait for threads at the end of the interpreter, up to the timeout."""
    threads = dict(_calls)
    for calls in threads.values():
        _drop(calls)
    deadline_s = time.monotonic() + END_TIMEOUT_S
    for thread in threads:
        thread.join(max(deadline_s - time.monotonic(), 0.0))
