"""Entry point of `python -m neo_desktop.engine.selfcheck`; `engine.doctor.trials` runs it."""

import os
from collections.abc import Iterator

from neo_desktop.engine.doctor.trials import Subject
from neo_desktop.engine.selfcheck.answers import AnswerChecks
from neo_desktop.engine.selfcheck.check import Check, serve
from neo_desktop.engine.selfcheck.kernel_checks import kernel_checks
from neo_desktop.engine.selfcheck.kv_checks import cpu_checks
from neo_desktop.engine.selfcheck.offload_checks import offload_checks
from neo_desktop.engine.selfcheck.rig import Rig


def checks_of(subject: Subject) -> Iterator[Check]:
    """Yield the checks of a subject in order."""
    rig = Rig(subject)
    rig.dtype  # noqa: B018  report an unusable subject before the first check
    is_gpu = rig.device.type == "cuda"
    if is_gpu:
        yield from kernel_checks(rig)
        yield from offload_checks(rig)
    yield from cpu_checks(rig)
    answers = AnswerChecks(rig)
    yield from answers.checks()
    if is_gpu and answers.is_loaded:
        yield answers.memory_check()


if __name__ == "__main__":
    os.environ.pop("NEO_DESKTOP_ISA", None)  # the checks try every instruction set
    serve(checks_of)
