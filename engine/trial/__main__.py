"""`python -m neo_desktop.engine.trial`: see `engine.doctor.trials`."""

import os
from collections.abc import Iterator

from neo_desktop.engine.doctor.trials import Subject
from neo_desktop.engine.trial.answers import AnswerChecks
from neo_desktop.engine.trial.check import Check, serve
from neo_desktop.engine.trial.cpu_checks import cpu_checks
from neo_desktop.engine.trial.hand_off_checks import hand_off_checks
from neo_desktop.engine.trial.kernel_checks import kernel_checks
from neo_desktop.engine.trial.rig import Rig


def checks_of(subject: Subject) -> Iterator[Check]:
    """Yield all checks of a subject, in order."""
    rig = Rig(subject)
    rig.dtype  # noqa: B018  what cannot be read or had is told before the first check
    is_gpu = rig.device.type == "cuda"
    if is_gpu:
        yield from kernel_checks(rig)
        yield from hand_off_checks(rig)
    yield from cpu_checks(rig)
    answers = AnswerChecks(rig)
    yield from answers.checks()
    if is_gpu and answers.is_loaded:
        yield answers.memory_check()


if __name__ == "__main__":
    os.environ.pop("NEO_DESKTOP_ISA", None)  # every instruction set has its turn
    serve(checks_of)
