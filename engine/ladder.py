"""The ladder: every mechanism that may fail on somebody's computer, and what serves in its place.

Each rung gives the same tokens; a lower one is slower, or takes more memory. Where a mechanism stands is a
matter of the whole process, since the GPU and its driver are:

    forced        NEO_DESKTOP_RUNG_<MECHANISM>=<rung> in the environment
    limited       `limit`: by a check at the start, by `doctor`, by a failure in the middle of the work
    otherwise     its highest rung

Mechanisms ask `rung` each time they have the choice, so that a limit holds from the next iteration on.
"""

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from neo_desktop import native
from neo_desktop.engine.wsl import is_wsl

logger = logging.getLogger(__name__)

VARIABLE_PREFIX = "NEO_DESKTOP_RUNG_"
_WSL_HINT = "; this is WSL2, see docs/wsl2.md"


@dataclass(frozen=True, slots=True)
class Rung:
    """One way of doing something."""

    name: str
    what: str  # in words, for tables


@dataclass(frozen=True, slots=True)
class Mechanism:
    """Something that can be done in several ways, the best one first."""

    name: str
    title: str
    rungs: tuple[Rung, ...]
    is_for_gpu: bool = True

    def position(self, rung: str) -> int:
        """Return how far down a rung is; 0 is the highest.

        Raises:
            ValueError: there is no such rung.
        """
        for index, each in enumerate(self.rungs):
            if each.name == rung:
                return index
        names = ", ".join(each.name for each in self.rungs)
        raise ValueError(f"{self.name} has no rung {rung!r}; choose one of: {names}")


def _kernel(name: str, title: str) -> Mechanism:
    return Mechanism(
        name, title, (Rung("triton", "a Triton kernel"), Rung("torch", "torch's operators, on any card"))
    )


MECHANISMS: Mapping[str, Mechanism] = {
    mechanism.name: mechanism
    for mechanism in (
        Mechanism(
            "graphs",
            "Iterations of decodes",
            (
                Rung("host-flags", "CUDA graphs that hand over to the CPU and back"),
                Rung("device-only", "CUDA graphs where only the GPU works; else launched piece by piece"),
                Rung("eager", "launched piece by piece"),
            ),
        ),
        _kernel("paged_decode", "Decode attention"),
        _kernel("rope_append", "Rotation, and KV into the cache"),
        _kernel("norm", "Residual and normalisation"),
        _kernel("activation", "Gated activation"),
        _kernel("row_copy", "Rows of KV into the cache and out of it"),
        _kernel("quantised", "Products with quantised weights"),
        _kernel("experts", "Mixtures of experts"),
        Mechanism(
            "prompt_attention",
            "Attention of prompts",
            (
                Rung("flash", "FlashAttention"),
                Rung("memory-efficient", "memory-efficient attention"),
                Rung("math", "plain products, piece by piece, which are slow"),
            ),
        ),
        Mechanism(
            "host_memory",
            "Host memory that the GPU reads and writes",
            (Rung("pinned", "pinned"), Rung("pageable", "pageable: copies wait for each other")),
        ),
        Mechanism(
            "isa",
            "Instructions of CPU attention",
            tuple(Rung(isa, isa) for isa in reversed(native.available_isas())),
            is_for_gpu=False,
        ),
        Mechanism(
            "huge_pages",
            "Pages of weights and KV in host memory",
            (Rung("huge", "huge pages"), Rung("small", "pages of the usual size")),
            is_for_gpu=False,
        ),
        Mechanism(
            "affinity",
            "Threads of CPU attention",
            (Rung("bound", "each bound to a core"), Rung("free", "wherever the system puts them")),
            is_for_gpu=False,
        ),
        Mechanism(
            "nvml",
            "What the driver tells of the GPU",
            (Rung("nvml", "all of it"), Rung("without", "what torch knows")),
        ),
    )
}

# Where these others stand lower, the mechanism stands on its lowest rung, whatever its own limit is.
NEEDS: Mapping[str, Mapping[str, str]] = {"graphs": {"host_memory": "pinned"}}


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a mechanism stands."""

    mechanism: Mechanism
    rung: Rung
    reason: str | None  # why it is not the highest; None: it is


class Ladder:
    """Where each mechanism stands; any thread may ask and limit.

    Args:
        forced: `mechanism -> rung`.

    Raises:
        ValueError: there is no such mechanism or rung.
    """

    def __init__(self, forced: Mapping[str, str] | None = None) -> None:
        self._lock = threading.Lock()
        self._positions: dict[str, int] = {}
        self._reasons: dict[str, str] = {}
        self._changes = 0
        for name, rung in (forced or {}).items():
            if name not in MECHANISMS:
                raise ValueError(f"there is no mechanism {name!r}; those there are: {', '.join(MECHANISMS)}")
            self._positions[name] = MECHANISMS[name].position(rung)
            self._reasons[name] = f"{variable(name)} asks for it"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Ladder":
        """Make a ladder from NEO_DESKTOP_RUNG_… variables; raises what the constructor raises."""
        return cls(
            {
                name.removeprefix(VARIABLE_PREFIX).lower(): rung
                for name, rung in environment.items()
                if name.startswith(VARIABLE_PREFIX) and rung
            }
        )

    def rung(self, mechanism: str) -> str:
        """Return the name of the rung to use now."""
        return MECHANISMS[mechanism].rungs[self._position(mechanism)].name

    def _position(self, mechanism: str) -> int:
        if self._unmet_need(mechanism) is not None:
            return len(MECHANISMS[mechanism].rungs) - 1
        return self._positions.get(mechanism, 0)

    def _unmet_need(self, mechanism: str) -> str | None:
        """Return what a mechanism lacks, in words; None: nothing."""
        for name, rung in NEEDS.get(mechanism, {}).items():
            other = MECHANISMS[name]
            position = other.position(rung)
            if self._positions.get(name, 0) > position:
                return f"{other.title}: it must be {other.rungs[position].what}"
        return None

    def limit(self, mechanism: str, rung: str, reason: str, *, is_told: bool = False) -> bool:
        """Use no higher rung than this one from now on.

        Args:
            reason: a clause for people, such as "the driver refused ...".
            is_told: people know already, and the log is spared.

        Returns:
            Whether that changed anything; it was logged then.
        """
        chosen = MECHANISMS[mechanism]
        if not self._lower(mechanism, rung, reason):
            return False
        if not is_told:
            what = chosen.rungs[chosen.position(rung)].what
            logger.warning("%s: %s (%s%s)", chosen.title, what, reason, _WSL_HINT if is_wsl() else "")
        return True

    def _lower(self, mechanism: str, rung: str, reason: str) -> bool:
        position = MECHANISMS[mechanism].position(rung)
        with self._lock:
            if self._positions.get(mechanism, 0) >= position:
                return False
            self._positions[mechanism] = position
            self._changes += 1
            self._reasons[mechanism] = reason
        return True

    def limit_all(self, mechanisms: Iterable[str], rung: str, reason: str) -> None:
        """Use no higher rung of several mechanisms; one line of the log tells of those that this changes.

        Args:
            reason: see `limit`.
        """
        changed = [name for name in mechanisms if self._lower(name, rung, reason)]
        if changed:
            what = MECHANISMS[changed[0]].rungs[MECHANISMS[changed[0]].position(rung)].what
            titles = "; ".join(MECHANISMS[name].title for name in changed)
            logger.warning("%s: %s (%s%s)", titles, what, reason, _WSL_HINT if is_wsl() else "")

    def descend(self, mechanism: str, reason: str) -> bool:
        """Use the rung below the present one from now on; return whether there is one."""
        position = self._position(mechanism) + 1
        rungs = MECHANISMS[mechanism].rungs
        return position < len(rungs) and self.limit(mechanism, rungs[position].name, reason)

    @contextmanager
    def standing_on(self, rungs: Mapping[str, str]) -> Iterator[None]:
        """Stand on these rungs within the block, higher or lower ones than before; then as before.

        It is of the whole process: no other work may be under way.

        Raises:
            ValueError: there is no such rung.
        """
        with self._lock:
            before = dict(self._positions), dict(self._reasons)
        try:
            self.put(rungs)
            yield
        finally:
            with self._lock:
                self._positions, self._reasons = before
                self._changes += 1

    def put(self, rungs: Mapping[str, str]) -> None:
        """Stand on these rungs from now on, higher or lower ones than before.

        Raises:
            ValueError: there is no such rung.
        """
        positions = {name: MECHANISMS[name].position(rung) for name, rung in rungs.items()}
        with self._lock:
            self._positions |= positions
            self._changes += 1
            self._reasons |= dict.fromkeys(positions, "it was asked for")

    @property
    def changes(self) -> int:
        """How often anything was changed; what depends on rungs is made anew when it has grown."""
        return self._changes

    def standings(self) -> Sequence[Standing]:
        """Return where all mechanisms stand."""
        return [
            Standing(
                mechanism,
                mechanism.rungs[self._position(name)],
                self._unmet_need(name) or self._reasons.get(name),
            )
            for name, mechanism in MECHANISMS.items()
        ]

    def limits(self) -> Mapping[str, str]:
        """Return `mechanism -> rung` of all that are not at their highest."""
        return {name: self.rung(name) for name, position in self._positions.items() if position}


def variable(mechanism: str) -> str:
    """Return the name of the environment variable that forces a mechanism's rung."""
    return VARIABLE_PREFIX + mechanism.upper()


ladder = Ladder.from_environment(os.environ)  # the process's
native.follow_isa(lambda: ladder.rung("isa"))
