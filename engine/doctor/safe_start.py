"""A start that ended its process makes the next one more careful.

    <cache>/starts/<pid>-<number>.mark   a start that is under way, or one that ended its process
    <cache>/starts/<key>.json            how careful starts on this computer are: the number of steps taken

A mark that a dead process left takes one step more. Steps are kept until something changes that decides what
works (GPU, driver, versions), or until `neo-desktop doctor --refresh` forgets them.
"""

import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from neo_desktop.engine.cuda.errors import is_lost
from neo_desktop.engine.doctor.machine import Key, digest, folder, machine_key, read_json, write_json
from neo_desktop.engine.ladder import MECHANISMS, ladder
from neo_desktop.engine.processes import is_alive, this_process

logger = logging.getLogger(__name__)

KERNELS = ("paged_decode", "rope_append", "norm", "activation", "row_copy")
_numbers = itertools.count()

Step = Mapping[str, str]  # mechanism -> rung


def steps(device_type: str) -> Sequence[Step]:
    """Return what is given up, in order; each step comes on top of those before.

    What is most likely to end a process comes first, and what costs the most speed late.
    """
    isas = [rung.name for rung in MECHANISMS["isa"].rungs]
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


class StartMark:
    """A start that is under way; see `begin_start`."""

    def __init__(self, path: Path, key: Key, level: int) -> None:
        self._path, self._key, self._level = path, key, level
        write_json(path, {"process": this_process(), "key": key, "level": level})

    def end(self) -> None:
        """The start has come to an orderly end, good or bad."""
        _remove(self._path)

    def crash(self) -> None:
        """It has ended in a way that is as bad as the end of the process."""
        _raise_level(self._key, self._level + 1)
        self.end()


def begin_start(device: torch.device) -> StartMark:
    """Say that an engine is about to be built, and be as careful as earlier starts that failed ask for.

    Limits the process's ladder, with one line in the log.
    """
    _take_steps()
    key = machine_key(device)
    plan = steps(device.type)
    level = min(_level(digest(key)), len(plan))
    if level:
        for mechanism, rung in ((m, r) for step in plan[:level] for m, r in step.items()):
            ladder.limit(mechanism, rung, "a start before ended the program", is_told=True)
        logger.warning(
            "a start before ended the program, so this one does without something that may be to blame: %s. "
            "To check this computer and to start in full again: neo-desktop doctor --refresh",
            _in_words(plan[:level]),
        )
        if level == len(plan) and device.type == "cuda":
            logger.warning("If this start fails, too: --device cpu does without the GPU")
    return StartMark(folder("starts") / f"{os.getpid()}-{next(_numbers)}.mark", key, level)


@contextmanager
def safe_start(device: torch.device) -> Iterator[None]:
    """Build an engine within the block; see `begin_start`.

    An error that leaves the GPU unusable counts as a start that ended its process.
    """
    mark = begin_start(device)
    try:
        yield
    except BaseException as error:
        if is_lost(error):
            mark.crash()
        raise
    finally:
        mark.end()


def note_crash(device: torch.device) -> None:
    """Let the next start be one step more careful, for whoever saw a process end without a mark."""
    key = machine_key(device)
    _raise_level(key, _level(digest(key)) + 1)


def forgive(pid: int) -> None:
    """Forget the marks of a process that was ended on purpose, in the middle of a start."""
    for path in folder("starts").glob(f"{pid}-*.mark"):
        _remove(path)


def start_in_full() -> None:
    """Forget all that earlier starts left, but for marks of processes that live."""
    for path in folder("starts").glob("*"):
        if path.suffix == ".json" or (path.suffix == ".mark" and _dead_mark(path) is not None):
            _remove(path)


def _take_steps() -> None:
    """Turn what dead processes left into steps."""
    for path in sorted(folder("starts").glob("*.mark")):
        mark = _dead_mark(path)
        if mark is not None:
            key, level = mark
            _raise_level(key, level + 1)
            _remove(path)


def _dead_mark(path: Path) -> tuple[Key, int] | None:
    """Return key and level of a start whose process has died; None: it lives, or nothing can be told."""
    mark = read_json(path)
    match mark:
        case {"process": str(process), "key": dict(key), "level": int(level)} if not is_alive(process):
            return key, level
    return None


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _level(name: str) -> int:
    match read_json(folder("starts") / f"{name}.json"):
        case {"level": int(level)} if level > 0:
            return level
    return 0


def _raise_level(key: Key, level: int) -> None:
    name = digest(key)
    if level > _level(name):
        write_json(folder("starts") / f"{name}.json", {"key": key, "level": level})


def _in_words(taken: Sequence[Step]) -> str:
    lowest: dict[str, str] = {}
    for step in taken:
        lowest |= step
    parts = []
    if set(KERNELS) <= lowest.keys():
        lowest = {name: rung for name, rung in lowest.items() if name not in KERNELS}
        parts.append("Triton kernels: torch's operators")
    for name, rung in lowest.items():
        mechanism = MECHANISMS[name]
        parts.append(f"{mechanism.title}: {mechanism.rungs[mechanism.position(rung)].what}")
    return "; ".join(parts)
