"""A GPU and a CPU that wait for each other always finish, in every possible order (see relay.pml)."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

_MODEL = Path(__file__).with_name("relay.pml")
_SECONDS = 600  # a few seconds are usual; only a model that grew too large exceeds the limit


def _command(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs the command {name} (Debian, Ubuntu: apt install spin gcc)")
    return path


def _run(folder: Path, *command: str) -> str:
    result = subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if result.returncode != 0:
        pytest.fail(f"{command[0]} ended with {result.returncode}:\n{result.stdout[-5000:]}", pytrace=False)
    return result.stdout


def _search(folder: Path, options: str, *, circles: bool = False) -> tuple[int, str]:
    """Explore all states; return the number of errors, and the first error's text.

    Args:
        options: macros of the model.
        circles: search for endless cycles instead of bad end states.
    """
    spin, compiler = _command("spin"), _command("cc")
    macros = [f"-D{option}" for option in options.split()]
    _run(folder, spin, "-a", *macros, str(_MODEL))
    kind = "-DNP" if circles else "-DSAFETY"
    _run(folder, compiler, "-O0", "-w", kind, "-DMEMLIM=1500", "-o", "pan", "pan.c")
    arguments: Sequence[str] = ("-l",) if circles else ()
    said = _run(folder, "./pan", "-m100000", *arguments)
    errors = re.search(r"errors: (\d+)", said)
    assert errors is not None, said
    assert "Search not completed" not in said or errors[1] != "0", said
    first = re.search(r"^pan:\d+: (.*)$", said, re.MULTILINE)
    return int(errors[1]), first[1] if first is not None else ""


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    "options",
    [
        "LAYERS=2 SUBS=2 QUEUES=1",
        "LAYERS=2 SUBS=2 QUEUES=2 ITERATIONS=1 ROOM=1",
        "LAYERS=2 SUBS=1 QUEUES=2",
        "LAYERS=2 SUBS=1 QUEUES=2 ITERATIONS=1 ROOM=4",
        "LAYERS=1 SUBS=1 QUEUES=2 ROOM=6",  # the whole graph fits into a queue
        "LAYERS=2 SUBS=1 QUEUES=3 ITERATIONS=1 ROOM=1",
        "LAYERS=2 SUBS=1 LAUNCH_FAILS",
        "LAYERS=2 SUBS=1 STEP_FAILS",
        "LAYERS=2 SUBS=1 RAISE_LOST",
        "LAYERS=2 SUBS=1 CPU_LATE",
        "LAYERS=2 SUBS=1 ITERATIONS=1 CPU_STOPS RAISE_LOST",
        "LAYERS=1 SUBS=2 CPU_STOPS",
        "LAYERS=2 SUBS=1 ITERATIONS=1 CLOSES LAUNCH_FAILS",
        "LAYERS=2 SUBS=1 ITERATIONS=1 CLOSES CPU_STOPS",
    ],
)
def test_everybody_ends_and_reads_what_was_written_for_it(tmp_path: Path, options: str) -> None:
    assert _search(tmp_path, options) == (0, "")


@pytest.mark.sample(0)
def test_nobody_goes_round_in_circles(tmp_path: Path) -> None:
    options = "LAYERS=1 SUBS=1 CPU_STOPS RAISE_LOST"
    assert _search(tmp_path, options, circles=True) == (0, "")


_DEADLOCK = "invalid end state"


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("defect", "faults", "found"),
    [
        ("NO_DESCENT", "", _DEADLOCK),
        ("NO_DESCENT", "QUEUES=2", _DEADLOCK),
        ("NO_DESCENT", "QUEUES=3 ITERATIONS=1", _DEADLOCK),
        ("GUARD_FORGETS", "CPU_STOPS", _DEADLOCK),
        ("GUARD_SLEEPS", "RAISE_LOST", _DEADLOCK),
        ("CANCEL_FORGETS_DEVICE", "LAUNCH_FAILS", _DEADLOCK),
        ("CANCEL_FORGETS_RELAY", "LAUNCH_FAILS", _DEADLOCK),
        ("FLAGS_STAY", "", "assertion violated"),
        ("NOT_SETTLED", "LAUNCH_FAILS", _DEADLOCK),
        ("DECIDES_LATE", "CPU_STOPS", _DEADLOCK),
        ("LEAVES_LATE", "CPU_LATE", "assertion violated"),
    ],
)
def test_defects_are_found(tmp_path: Path, defect: str, faults: str, found: str) -> None:
    errors, first = _search(tmp_path, f"LAYERS=2 SUBS=1 {faults} {defect}")
    assert errors > 0
    assert first.startswith(found)
