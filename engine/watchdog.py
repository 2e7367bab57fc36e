"""Waits for other threads and for the GPU, with a timeout.

A thread that waits in an iteration polls for the end of any stage. If no stage ends within the timeout, it
stops waiting. The timeout is long enough that a slow or busy computer never reaches it: the longer of half a
minute and twenty times the predicted time of the whole iteration.

Only time in which the waiting thread could poll counts. Neither a suspended computer (`time.monotonic` stands
still then on Linux) nor a stopped process returns to an expired deadline.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

# Answers within microseconds require polling without sleeps. Later sleeps are short: they add half a percent
# to the waiting time, and leave the CPU to threads that compute.
_RESTLESS_S = 100e-6
_REST_SHARE = 1 / 200
_SHORTEST_REST_S, _LONGEST_REST_S = 20e-6, 1e-3

_MOST_COUNTED_S = 0.1  # of the time between two polls


@dataclass(frozen=True, slots=True)
class Timeout:
    """Limits on the time without progress in an iteration."""

    least_s: float = 30.0
    factor: float = 20.0  # of the predicted time of the whole iteration

    def watch(self, predicted_ms: float = 0.0) -> "Watchdog":
        """Create the watchdog of one iteration; a predicted time of 0 is unknown."""
        return Watchdog(max(self.least_s, self.factor * predicted_ms / 1e3), predicted_ms)


DEFAULT_TIMEOUT = Timeout()


class Watchdog:
    """The timeout of one iteration, see `Timeout`; thread-safe."""

    def __init__(self, timeout_s: float, predicted_ms: float = 0.0) -> None:
        self.timeout_s = timeout_s
        self.is_given_up = False
        self._predicted_ms = predicted_ms
        self._progress = 0
        self._under_way: dict[str, str] = {}  # description by thread
        self._steps: Callable[[], int] | None = None

    def tick(self) -> None:
        """Record the end of a stage, which restarts the timeout of every waiting thread."""
        self._progress += 1  # concurrent ticks may count once; only a change matters

    def follow(self, steps: Callable[[], int]) -> None:
        """Add a progress counter for work that does not call `tick`."""
        self._steps = steps

    @property
    def progress(self) -> int:
        return self._progress + (0 if self._steps is None else self._steps())

    def began(self, thread: str, what: str) -> None:
        """Record a thread's activity, in words for users."""
        self._under_way[thread] = what

    def ended(self, thread: str) -> None:
        self._under_way.pop(thread, None)
        self.tick()

    def give_up(self) -> None:
        self.is_given_up = True

    def wait_until(self, is_done: Callable[[], bool], timeout: float = 1.0) -> bool:
        """Poll until `is_done` returns True; return False after the timeout, a multiple of `timeout_s`."""
        return self._wait(is_done, _rests(), timeout)

    def wait_by(self, wait: Callable[[float], bool], timeout: float = 1.0) -> bool:
        """Wait with a call that wakes this thread; return False after the timeout.

        Args:
            wait: waits at most the given seconds; returns True when done.
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
        predicted = f"; the whole iteration should take {self._predicted_ms:.0f} ms"
        return f"within {self.timeout_s:.1f} s{predicted if self._predicted_ms else ''}"

    @property
    def under_way(self) -> str:
        doing = [f"{what} (thread {thread!r})" for thread, what in dict(self._under_way).items()]
        return " and ".join(doing) or "what a thread waits for"


def _rests() -> Callable[[], None]:
    """Return a function that sleeps between polls: not at first, then in proportion to the time waited."""
    start_s = time.monotonic()

    def rest() -> None:
        waited_s = time.monotonic() - start_s
        if waited_s < _RESTLESS_S:
            time.sleep(0)  # let other threads take the interpreter
        else:
            time.sleep(min(max(waited_s * _REST_SHARE, _SHORTEST_REST_S), _LONGEST_REST_S))

    return rest
