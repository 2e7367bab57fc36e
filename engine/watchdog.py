"""Waiting for other threads and for the GPU, but never for ever.

A thread that waits in an iteration looks again and again whether any stage of it has ended. When none has for
longer than the timeout, it gives up what it waits for. The timeout is generous, so that a computer that is
merely slow or busy never sees it: half a minute without a single stage's end, or twenty times what the whole
iteration should take, whichever is longer.

Only time counts in which the waiting thread could look. Neither a suspended computer (the clock of
`time.monotonic` stands still then on Linux) nor a stopped process comes back to a deadline that has passed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

# Looking without a rest is what an answer within microseconds takes. After that, rests are so short that they
# add half a percent to what was waited for, and leave the CPU to threads that compute.
_RESTLESS_S = 100e-6
_REST_SHARE = 1 / 200
_SHORTEST_REST_S, _LONGEST_REST_S = 20e-6, 1e-3

_MOST_COUNTED_S = 0.1  # of the time between two looks


@dataclass(frozen=True, slots=True)
class Timeout:
    """For how long nothing may go on in an iteration before it is given up."""

    least_s: float = 30.0
    factor: float = 20.0  # of what the whole iteration should take

    def watch(self, predicted_ms: float = 0.0) -> "Watchdog":
        """Return what the threads of an iteration wait with.

        Args:
            predicted_ms: what it should take; 0: nobody knows.
        """
        return Watchdog(max(self.least_s, self.factor * predicted_ms / 1e3), predicted_ms)


DEFAULT_TIMEOUT = Timeout()


class Watchdog:
    """One iteration's timeout. Any thread may use it.

    Args:
        timeout_s: see `Timeout`.
        predicted_ms: what the iteration should take; 0: nobody knows.
    """

    def __init__(self, timeout_s: float, predicted_ms: float = 0.0) -> None:
        self.timeout_s = timeout_s
        self.is_given_up = False
        self._predicted_ms = predicted_ms
        self._progress = 0
        self._under_way: dict[str, str] = {}  # by thread
        self._steps: Callable[[], int] | None = None

    def tick(self) -> None:
        """Take in that a stage has ended: everybody's timeout begins anew."""
        self._progress += 1  # two threads at once may count one: what matters is that it changes

    def follow(self, steps: Callable[[], int]) -> None:
        """Take a number that changes with all that goes on, for what nobody else tells of."""
        self._steps = steps

    @property
    def progress(self) -> int:
        """What changes whenever something goes on."""
        return self._progress + (0 if self._steps is None else self._steps())

    def began(self, thread: str, what: str) -> None:
        """Take in what a thread does, in words for people."""
        self._under_way[thread] = what

    def ended(self, thread: str) -> None:
        """Take in that it has ended."""
        self._under_way.pop(thread, None)
        self.tick()

    def give_up(self) -> None:
        """Let nobody wait any more."""
        self.is_given_up = True

    def wait_until(self, is_done: Callable[[], bool], timeout: float = 1.0) -> bool:
        """Wait until something is so; return whether it is.

        Args:
            is_done: asked again and again; its exceptions are the caller's.
            timeout: in units of the watch's.
        """
        rest = _Rest()
        return self._wait(is_done, rest.take, timeout)

    def wait_by(self, wait: Callable[[float], bool], timeout: float = 1.0) -> bool:
        """The same, by something that wakes the caller.

        Args:
            wait: waits for so many seconds at most; returns whether it is done.
        """
        look_s = min(self.timeout_s * timeout / 8, 1.0)
        return self._wait(lambda: wait(look_s), lambda: None, timeout, look_s)

    def _wait(
        self,
        is_done: Callable[[], bool],
        rest: Callable[[], object],
        timeout: float,
        most_counted_s: float = _MOST_COUNTED_S,
    ) -> bool:
        last_s, idle_s, seen = time.monotonic(), 0.0, self.progress
        while not is_done():
            if self.is_given_up:
                return False
            now_s = time.monotonic()
            idle_s += min(now_s - last_s, most_counted_s)
            last_s = now_s
            if (progress := self.progress) != seen:
                seen, idle_s = progress, 0.0
            elif idle_s >= self.timeout_s * timeout:
                return False
            rest()
        return True

    @property
    def words(self) -> str:
        """How long was waited, for people."""
        predicted = f"; the whole iteration should take {self._predicted_ms:.0f} ms"
        return f"within {self.timeout_s:.1f} s{predicted if self._predicted_ms else ''}"

    @property
    def under_way(self) -> str:
        """What the threads are doing, for people."""
        doing = [f"{what} (thread {thread!r})" for thread, what in dict(self._under_way).items()]
        return " and ".join(doing) or "what a thread waits for"


class _Rest:
    """Rests between two looks: none at first, then longer ones the longer it takes."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()

    def take(self) -> None:
        waited_s = time.monotonic() - self._start_s
        if waited_s < _RESTLESS_S:
            time.sleep(0)  # others may need the interpreter
        else:
            time.sleep(min(max(waited_s * _REST_SHARE, _SHORTEST_REST_S), _LONGEST_REST_S))
