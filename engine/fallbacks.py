"""Fallbacks: mechanisms that may fail on some computers, and their replacements.

Levels produce the same tokens, except that "quantised" rounds differently; lower ones are slower, or take
more memory. The level of a mechanism applies to the whole process, like the GPU and its driver:

    forced        NEO_DESKTOP_LEVEL_<MECHANISM>=<level> in the environment
    limited       `limit`: by a check at the start, by `doctor`, or by a failure at run time
    otherwise     its highest level

Mechanisms query `level` at each use, so a limit applies from the next iteration on.
"""

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from neo_desktop import native

logger = logging.getLogger(__name__)

VARIABLE_PREFIX = "NEO_DESKTOP_LEVEL_"
_WSL_HINT = "; this is WSL2, see docs/wsl2.md"
_RELEASE = Path("/proc/sys/kernel/osrelease")


@dataclass(frozen=True, slots=True)
class Level:
    """One implementation of a mechanism."""

    name: str
    what: str  # description for tables


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A mechanism with several implementations, the best first."""

    name: str
    title: str
    levels: tuple[Level, ...]
    is_for_gpu: bool = True

    def position(self, level: str) -> int:
        """Return the position of a level, 0 for the highest; raise ValueError if it is unknown."""
        names = [each.name for each in self.levels]
        if level not in names:
            raise ValueError(f"{self.name} may be one of {', '.join(names)}, not {level!r}.")
        return names.index(level)


def _kernel(name: str, title: str) -> Mechanism:
    return Mechanism(
        name, title, (Level("triton", "a Triton kernel"), Level("torch", "torch's operators, on any card"))
    )


MECHANISMS: Mapping[str, Mechanism] = {
    mechanism.name: mechanism
    for mechanism in (
        Mechanism(
            "graphs",
            "Iterations of decodes",
            (
                Level("host-flags", "CUDA graphs with round trips to the CPU"),
                Level("device-only", "CUDA graphs for GPU-only work; other work launched piece by piece"),
                Level("eager", "launched piece by piece"),
            ),
        ),
        _kernel("paged_decode", "Decode attention"),
        _kernel("rope_append", "Rotary embedding and KV cache append"),
        _kernel("norm", "Residual and normalisation"),
        _kernel("activation", "Gated activation"),
        _kernel("row_copy", "KV cache reads and writes"),
        Mechanism(
            "quantised",
            "Matmuls with quantised weights",
            (
                Level("integers", "a Triton kernel that rounds inputs to 8 bits"),
                Level("exact", "a Triton kernel that multiplies floats"),
                Level("torch", "torch's operators, on any card"),
            ),
        ),
        _kernel("experts", "MoE layers"),
        Mechanism(
            "recurrent",
            "Recurrent layers",
            (
                Level("chunks", "Triton kernels that take prompts in chunks"),
                Level("tokens", "Triton kernels that take prompts token by token"),
                Level("torch", "torch's operators, on any card"),
            ),
        ),
        Mechanism(
            "prompt_attention",
            "Attention of prompts",
            (
                Level("flash", "FlashAttention"),
                Level("memory-efficient", "memory-efficient attention"),
                Level("math", "plain matmuls in pieces, which are slow"),
            ),
        ),
        Mechanism(
            "host_memory",
            "Host memory that the GPU reads and writes",
            (Level("pinned", "pinned"), Level("pageable", "pageable: copies wait for each other")),
        ),
        Mechanism(
            "isa",
            "Instructions of CPU attention",
            tuple(Level(isa, isa) for isa in reversed(native.available_isas())),
            is_for_gpu=False,
        ),
        Mechanism(
            "huge_pages",
            "Pages of weights and KV in host memory",
            (Level("huge", "huge pages"), Level("small", "pages of the usual size")),
            is_for_gpu=False,
        ),
        Mechanism(
            "affinity",
            "Threads of CPU attention",
            (Level("bound", "each bound to a core"), Level("free", "placed by the system")),
            is_for_gpu=False,
        ),
        Mechanism(
            "nvml",
            "GPU information from the driver",
            (Level("nvml", "complete"), Level("without", "from torch only")),
        ),
    )
}

# Mechanisms with a Triton kernel.
KERNELS = tuple(name for name, mechanism in MECHANISMS.items() if mechanism.levels[-1].name == "torch")

# mechanism -> required levels of others; if one is lower, the mechanism uses its lowest level.
NEEDS: Mapping[str, Mapping[str, str]] = {"graphs": {"host_memory": "pinned"}}


@dataclass(frozen=True, slots=True)
class FallbackState:
    """Current level of a mechanism."""

    mechanism: Mechanism
    level: Level
    reason: str | None  # cause of a lower level; None: it is the highest


class Fallbacks:
    """Levels of the mechanisms; thread-safe.

    Args:
        environment: NEO_DESKTOP_LEVEL_… variables force levels; ValueError: one of them is unknown.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._lock = threading.Lock()
        self._lowered: dict[str, tuple[int, str]] = {}  # mechanism -> position of its level, and the reason
        self.changes = 0  # so far: rebuild objects that depend on levels when it has grown
        for given, level in (environment or {}).items():
            if not given.startswith(VARIABLE_PREFIX) or not level:
                continue
            name = given.removeprefix(VARIABLE_PREFIX).lower()
            if name not in MECHANISMS:
                raise ValueError(f"{given}: there is no such mechanism, only {', '.join(MECHANISMS)}")
            try:
                position = MECHANISMS[name].position(level)
            except ValueError as error:
                raise ValueError(f"{given}: {error}") from None
            self._lowered[name] = position, f"{given} asks for it"

    def level(self, mechanism: str) -> str:
        return MECHANISMS[mechanism].levels[self._position(mechanism)].name

    def _position(self, mechanism: str) -> int:
        if self._unmet_need(mechanism) is not None:
            return len(MECHANISMS[mechanism].levels) - 1
        return self._state(mechanism)[0]

    def _state(self, mechanism: str) -> tuple[int, str | None]:
        return self._lowered.get(mechanism, (0, None))

    def _unmet_need(self, mechanism: str) -> str | None:
        """Return the unmet requirement of a mechanism, in words; None: all are met."""
        for name, level in NEEDS.get(mechanism, {}).items():
            other = MECHANISMS[name]
            position = other.position(level)
            if self._state(name)[0] > position:
                return f"{other.title}: it must be {other.levels[position].what}"
        return None

    def limit(self, mechanism: str, level: str, reason: str, *, is_told: bool = False) -> bool:
        """Limit a mechanism to this level or lower ones; return True if the level changed.

        Args:
            reason: a clause for users, like "the driver refused ...".
            is_told: users know already; do not log.
        """
        return self.limit_all([mechanism], level, reason, is_told=is_told)

    def limit_all(self, names: Iterable[str], level: str, reason: str, *, is_told: bool = False) -> bool:
        """Limit several mechanisms; log one line about the changed ones."""
        changed: list[Mechanism] = []
        for mechanism in map(MECHANISMS.__getitem__, names):
            position = mechanism.position(level)
            with self._lock:
                if self._state(mechanism.name)[0] < position:
                    self._lowered[mechanism.name] = position, reason
                    self.changes += 1
                    changed.append(mechanism)
        if changed and not is_told:
            titles = "; ".join(each.title for each in changed)
            what = changed[0].levels[changed[0].position(level)].what
            logger.warning("%s: %s (%s%s)", titles, what, reason, _WSL_HINT if is_wsl() else "")
        return bool(changed)

    def descend(self, mechanism: str, reason: str) -> bool:
        """Fall back by one level; return False if no lower level exists."""
        position = self._position(mechanism) + 1
        levels = MECHANISMS[mechanism].levels
        return position < len(levels) and self.limit(mechanism, levels[position].name, reason)

    @contextmanager
    def at_levels(self, levels: Mapping[str, str]) -> Iterator[None]:
        """Use these levels within the block, higher or lower than before; restore them afterwards.

        Levels apply to the whole process, so no other work may be running.
        """
        with self._lock:
            before = dict(self._lowered)
        try:
            self.put(levels)
            yield
        finally:
            with self._lock:
                self._lowered = before
                self.changes += 1

    def put(self, levels: Mapping[str, str]) -> None:
        """Use these levels from now on, higher or lower than before."""
        reason = "set explicitly"
        states = {name: (MECHANISMS[name].position(level), reason) for name, level in levels.items()}
        with self._lock:
            self._lowered |= states
            self.changes += 1

    def states(self) -> Sequence[FallbackState]:
        return [
            FallbackState(
                mechanism,
                mechanism.levels[self._position(name)],
                self._unmet_need(name) or self._state(name)[1],
            )
            for name, mechanism in MECHANISMS.items()
        ]

    def limits(self) -> Mapping[str, str]:
        """Return `mechanism -> level` for mechanisms below their highest level."""
        return {name: self.level(name) for name, (position, _) in self._lowered.items() if position}


@cache
def is_wsl(release: Path = _RELEASE) -> bool:
    """Return True in Linux inside Windows (WSL2), where the driver refuses more operations."""
    try:
        return "microsoft" in release.read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return False


def variable(mechanism: str) -> str:
    """Return the name of the environment variable that forces a mechanism's level."""
    return VARIABLE_PREFIX + mechanism.upper()


fallbacks = Fallbacks(os.environ)  # the process's
native.follow_isa(lambda: fallbacks.level("isa"))
