"""A child process whose checks fail in every way, for the parent under test in `test_trials`."""

import math
import os
import signal
import sys
from collections.abc import Callable, Iterator

from neo_desktop.engine.doctor.outcome import Figures
from neo_desktop.engine.doctor.trials import Subject
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.selfcheck.check import Check, serve
from neo_desktop.engine.selfcheck.rig import on_levels, require


def well() -> Figures:
    print("a library says something")
    return {"error": 0.0}


counts = [0]


def needed() -> Figures:
    counts[0] += 1
    return {"count": counts[0]}


def hang() -> Figures:
    while True:
        signal.pause()


def crash() -> Figures:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def leave() -> Figures:
    os._exit(7)


def wrong() -> Figures:
    return require(math.nan, 1e-3, {"cases": 3})


def refused() -> Figures:
    raise RuntimeError(f"cuThis failed in {os.path.expanduser('~')}/secret\nhint for programmers")


def full() -> Figures:
    raise RuntimeError("CUDA error: out of memory")


def replaced() -> Figures:
    with on_levels({"norm": "triton"}):
        fallbacks.limit("norm", "torch", "no compiler")
    return {}


def where_it_stands() -> Figures:
    return {"count": counts[0]} | {
        name: fallbacks.level(name) for name in ("graphs", "paged_decode", "norm", "rope_append")
    }


def checks_of(subject: Subject) -> Iterator[Check]:
    if subject.model == "nothing":
        raise ValueError("there is no such model")

    def check(
        name: str, run: Callable[[], Figures], mechanism: str | None = None, level: str | None = None
    ) -> Check:
        return Check(
            name,
            name.capitalize(),
            mechanism,
            level,
            5.0 if run is hang else 100.0,
            run,
            is_needed=run is needed,
        )

    if subject.model == "good":
        yield check("well", well, "activation", "triton")
        return
    if subject.model == "bad":
        for level in ("triton", "torch"):
            yield check(f"norm-{level}", wrong, "norm", level)
        return
    yield check("needed", needed)
    yield check("well", well, "activation", "triton")
    yield check("hang", hang, "graphs", "host-flags")
    yield check("crash", crash, "graphs", "device-only")
    yield check("leave", leave)
    yield check("wrong", wrong, "paged_decode", "triton")
    yield check("right", well, "paged_decode", "torch")
    yield check("refused", refused)
    if subject.shape is None:  # out of memory leaves one result unknown; with a shape, all are known
        yield check("full", full, "rope_append", "triton")
    yield check("replaced", replaced, "norm", "triton")
    yield check("where", where_it_stands)


if __name__ == "__main__":
    if sys.argv[1:] == ["dead"]:
        sys.exit(3)
    serve(checks_of)
