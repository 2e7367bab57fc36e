"""The restarts of an engine that ended by itself, and the verdict when they end."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from neo_desktop.engine.fallbacks import KERNELS, MECHANISMS, fallbacks

PAUSES_S = (0.5, 2.0, 5.0)  # before each start in a row; there are no more than these
WINDOW_S = 600.0  # in which they are counted
MAX_REASONS = 3  # that the verdict names

Step = Mapping[str, str]  # mechanism -> level


def steps(device_type: str) -> Sequence[Step]:
    """Return the mechanisms to give up, in order; each step includes the earlier ones.

    The likeliest causes of crashes come first, the greatest loss of speed last.
    """
    isas = [level.name for level in MECHANISMS["isa"].levels]
    on_cpu: list[Step] = [
        {"isa": isas[min(1, len(isas) - 1)], "huge_pages": "small", "affinity": "free"},
        {"isa": isas[-1]},
    ]
    if device_type != "cuda":
        return on_cpu
    return [
        {"graphs": "device-only"},
        {"graphs": "eager"},
        dict.fromkeys(KERNELS, "torch"),
        {"prompt_attention": "math", "host_memory": "pageable", "nvml": "without"},
        *on_cpu,
    ]


def careful_levels(device_type: str, num_steps: int) -> Step:
    """Return `mechanism -> level` after this many steps."""
    return {mechanism: level for step in steps(device_type)[:num_steps] for mechanism, level in step.items()}


class Restarts:
    """Counts the times that the engine of one model was started again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._starts_s: deque[float] = deque()
        self._reasons: list[str] = []  # without repetition, the newest last
        self._num_failed = 0  # starts in a row

    @property
    def pause_s(self) -> float | None:
        """Seconds before the next start; None: there is none."""
        if self._num_failed >= len(PAUSES_S):
            return None
        while self._starts_s and self._starts_s[0] <= self._clock() - WINDOW_S:
            self._starts_s.popleft()
        return PAUSES_S[len(self._starts_s)] if len(self._starts_s) < len(PAUSES_S) else None

    def ended(self, reason: str) -> None:
        self._reasons = [*(each for each in self._reasons if each != reason), reason][-MAX_REASONS:]

    def failed(self, reason: str) -> None:
        """It could not be started again. However long that took, it counts until a start succeeds."""
        self.ended(reason)
        self._num_failed += 1

    def loaded(self) -> None:
        self._num_failed = 0

    def begun(self) -> None:
        self._starts_s.append(self._clock())

    def be_careful(self, device: str) -> None:
        """Limit this program's fallbacks, which the engine's next process takes over: one step a start.

        The first start of a row is in full: a computer that slept loses its GPU for no fault of a mechanism.
        """
        for mechanism, level in careful_levels(device, len(self._starts_s) - 1).items():
            fallbacks.limit(mechanism, level, "the engine has ended more than once")

    def forget(self) -> None:
        """A person has chosen: what was before does not count."""
        self._starts_s.clear()
        self._reasons.clear()
        self._num_failed = 0

    def verdict(self, name: str, device: str) -> str:
        """Say why it is not started again, and give advice; without a full stop."""
        reasons = "; before that: ".join(reversed(self._reasons))
        advice = (
            "To go on without the GPU, start the program with --device cpu (neo-desktop chat --device cpu)"
            if device == "cuda"
            else "To try again, load it on the page or restart the server"
        )
        return (
            f"the engine of {name} was started again {len(PAUSES_S)} times within {WINDOW_S / 60:g} minutes "
            f"and ended each time, so it is left: {reasons}. {advice}"
        )
