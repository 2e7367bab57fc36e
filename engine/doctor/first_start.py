"""Checks of a GPU at the first start; later starts use the stored results."""

import logging
import os
import time
from collections.abc import Sequence

import torch

from neo_desktop.engine.doctor.outcome import Outcome, Result
from neo_desktop.engine.doctor.trials import CHILD, Subject, run_selfchecks
from neo_desktop.engine.doctor.verdict import Verdict, keep, new_verdict, read_verdict, verdict_key
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.loading import choose_dtype, open_model
from neo_desktop.engine.progress import Progress
from neo_desktop.models.shapes import shape as published_shape

logger = logging.getLogger(__name__)

VARIABLE = "NEO_DESKTOP_DOCTOR"  # "off" in the environment: starts run no checks and use no verdict


def check_at_first_start(
    subject: Subject, device: torch.device, progress: Progress | None = None, child: Sequence[str] = CHILD
) -> Verdict | None:
    """Limit the process's fallbacks to levels that work here with this model's shape.

    On a GPU the checks run now unless a verdict exists. On a CPU only `neo-desktop doctor` runs them.

    Returns:
        The new or stored verdict; None: unknown.

    Raises:
        ValueError, ModelError: the model cannot be loaded.
        RuntimeError: this GPU cannot be used; the message suggests remedies.
    """
    if os.environ.get(VARIABLE, "").lower() in ("off", "0", "no"):
        return None
    key = subject_key(subject, device)
    verdict = read_verdict(key)
    if verdict is None and device.type == "cuda":
        verdict = _check(subject, key, progress, child)
    if verdict is not None:
        verdict.apply(fallbacks)
        if (lost := next(iter(verdict.lost), None)) is not None:
            raise RuntimeError(
                f"a check on this computer fails at every fallback level ({lost.title}: {lost.reason}): "
                "neo-desktop doctor --refresh checks again, --device cpu avoids the GPU, "
                f"{VARIABLE}=off starts anyway"
            )
    return verdict


def subject_key(subject: Subject, device: torch.device) -> dict[str, object]:
    """Return the key of a subject's verdict; raises the errors of loading the subject."""
    if subject.shape is not None:
        config = published_shape(subject.shape)
    else:
        config = open_model(subject.model).config()
    return verdict_key(device, config, choose_dtype(subject.dtype, config, device))


def _check(
    subject: Subject, key: dict[str, object], progress: Progress | None, child: Sequence[str]
) -> Verdict | None:
    started = time.perf_counter()

    def tell(title: str, outcome: Outcome | None) -> None:
        if progress is not None and outcome is None:
            progress(0.0, f"first start on this GPU: {title}")

    outcomes = run_selfchecks(subject, listener=tell, child=child)
    verdict = new_verdict(key, outcomes, is_quick=subject.is_quick)
    last = outcomes[-1]
    if last.name == "start":  # the checks were interrupted: the next start tries again
        if last.result is not Result.FAILED:
            raise RuntimeError(
                f"this GPU could not be used in a trial: {last.reason}. Start again, or without the GPU "
                f"(--device cpu); {VARIABLE}=off starts without trials"
            )
        logger.warning("this GPU could not be checked: %s", last.reason)
        return None
    keep(verdict)
    logger.info("first start on this GPU: %d checks in %.0f s", len(outcomes), time.perf_counter() - started)
    for outcome in verdict.failed:
        if outcome.mechanism is None:
            logger.warning("%s: %s", outcome.title, outcome.reason)
    return verdict
