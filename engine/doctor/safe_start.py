"""After a start that crashed the process, the next one is more careful.

    <cache>/starts/<pid>-<number>.mark   a start in progress, or one that crashed its process
    <cache>/starts/<key>.json            caution level and number of crashed starts on this computer

A mark of a dead process adds one step of caution. Closed windows, killed processes and power cuts also end
programs. So after the first crash, the next start is careful, and if it succeeds, the following one is normal
again. Later steps persist until a relevant change (GPU, driver, versions), or until
`neo-desktop doctor --refresh` removes them.
"""

import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from neo_desktop.engine.cache_files import Key, cache_folder, digest, read_json, write_json
from neo_desktop.engine.cuda.errors import is_lost
from neo_desktop.engine.doctor.verdict import CANNOT_KEEP, machine_key
from neo_desktop.engine.fallbacks import KERNELS, MECHANISMS, fallbacks
from neo_desktop.engine.processes import is_alive, this_process

logger = logging.getLogger(__name__)

_numbers = itertools.count()

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


class StartMark:
    """A start in progress; see `begin_start`."""

    def __init__(self, path: Path, key: Key, caution: int) -> None:
        self._path, self._key, self._level = path, key, caution
        write_json(path, {"process": this_process(), "key": key, "caution": caution}, CANNOT_KEEP)

    def end(self) -> None:
        """Record an orderly end of the start, successful or not."""
        if self._level and _record(digest(self._key)).num_ended == 1:  # it may have been for other reasons
            _keep(self._key, _Record(0, 1))
        _remove(self._path)

    def crash(self) -> None:
        """Record an end as bad as a crash of the process."""
        _take_step(self._key, self._level)
        _remove(self._path)


def begin_start(device: torch.device) -> StartMark:
    """Record that an engine is about to start, as carefully as earlier crashed starts require.

    The call limits the process's fallbacks and logs one line.
    """
    _take_steps()
    key = machine_key(device)
    plan = steps(device.type)
    record = _record(digest(key))
    caution = min(record.caution, len(plan))
    if caution:
        levels = careful_levels(device.type, caution)
        for mechanism, level in levels.items():
            fallbacks.limit(mechanism, level, "an earlier start ended unexpectedly", is_told=True)
        logger.warning(
            "an earlier start ended unexpectedly, so this one avoids possible causes: %s. "
            "%sTo check this computer and restore normal starts: neo-desktop doctor --refresh",
            _in_words(levels),
            "The next one will be normal again. " if record.num_ended == 1 else "",
        )
        if caution == len(plan) and device.type == "cuda":
            logger.warning("If this start also fails, use --device cpu to avoid the GPU")
    return StartMark(cache_folder("starts") / f"{os.getpid()}-{next(_numbers)}.mark", key, caution)


@contextmanager
def safe_start(device: torch.device) -> Iterator[None]:
    """Build an engine within the block; see `begin_start`.

    An error that leaves the GPU unusable counts as a crash.
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


def careful_levels(device_type: str, num_steps: int) -> Step:
    """Return `mechanism -> level` after this many steps."""
    return {mechanism: level for step in steps(device_type)[:num_steps] for mechanism, level in step.items()}


def forgive(pid: int) -> None:
    """Remove the marks of a process that was killed on purpose during a start."""
    for path in cache_folder("starts").glob(f"{pid}-*.mark"):
        _remove(path)


def start_in_full() -> None:
    """Remove all records of earlier starts, except for marks of living processes."""
    for path in cache_folder("starts").glob("*"):
        if path.suffix == ".json" or (path.suffix == ".mark" and _dead_mark(path) is not None):
            _remove(path)


def _take_steps() -> None:
    """Turn the marks of dead processes into steps."""
    for path in sorted(cache_folder("starts").glob("*.mark")):
        mark = _dead_mark(path)
        if mark is not None:
            _take_step(*mark)
            _remove(path)


def _dead_mark(path: Path) -> tuple[Key, int] | None:
    """Return key and caution of a start whose process has died; None: it lives, or the mark is unreadable."""
    mark = read_json(path)
    match mark:
        case {"process": str(process), "key": dict(key), "caution": int(caution)} if not is_alive(process):
            return key, caution
    return None


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Record:
    """Record of earlier starts on a computer."""

    caution: int = 0  # steps taken
    num_ended: int = 0  # crashed starts; two with the same caution count once


def _record(name: str) -> _Record:
    match read_json(cache_folder("starts") / f"{name}.json"):
        case {"caution": int(caution), "num_ended": int(num_ended)} if caution >= 0 and num_ended >= 0:
            return _Record(caution, num_ended)
    return _Record()


def _take_step(key: Key, caution: int) -> None:
    """Record that a start with this caution crashed."""
    record = _record(digest(key))
    if caution >= record.caution:
        _keep(key, _Record(caution + 1, record.num_ended + 1))


def _keep(key: Key, record: _Record) -> None:
    write_json(cache_folder("starts") / f"{digest(key)}.json", {"key": key} | asdict(record), CANNOT_KEEP)


def _in_words(lowest: Step) -> str:
    parts = []
    if set(KERNELS) <= lowest.keys():
        lowest = {name: level for name, level in lowest.items() if name not in KERNELS}
        parts.append("Triton kernels: torch's operators")
    for name, level in lowest.items():
        mechanism = MECHANISMS[name]
        parts.append(f"{mechanism.title}: {mechanism.levels[mechanism.position(level)].what}")
    return "; ".join(parts)
