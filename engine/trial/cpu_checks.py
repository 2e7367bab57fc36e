"""Checks of CPU attention: every instruction set, and how its memory and its threads are had."""

from collections.abc import Iterator
from functools import partial

import torch

from neo_desktop.engine.doctor.outcome import Figures
from neo_desktop.engine.kv.host_layer import HostLayer
from neo_desktop.engine.ladder import MECHANISMS
from neo_desktop.engine.trial.check import Check
from neo_desktop.engine.trial.kv_checks import check_decode, check_rows
from neo_desktop.engine.trial.rig import Rig, on_rungs

KERNEL_DEADLINE_S = 60.0


def cpu_checks(rig: Rig) -> Iterator[Check]:
    """Yield the checks of KV in host memory."""
    for rung in MECHANISMS["isa"].rungs:
        for dtype, what in ((rig.dtype, str(rig.dtype).removeprefix("torch.")), (torch.int8, "int8")):
            yield Check(
                f"cpu-attention-{rung.name}-{what}",
                f"CPU attention, {rung.what}, KV in {what}",
                "isa",
                rung.name,
                KERNEL_DEADLINE_S,
                partial(_attention, rig, "isa", rung.name, dtype),
            )
    for mechanism in ("huge_pages", "affinity"):
        for rung in MECHANISMS[mechanism].rungs:
            yield Check(
                f"{mechanism}-{rung.name}",
                f"{MECHANISMS[mechanism].title}: {rung.what}",
                mechanism,
                rung.name,
                KERNEL_DEADLINE_S,
                partial(_attention, rig, mechanism, rung.name, rig.dtype),
            )


def _attention(rig: Rig, mechanism: str, rung: str, dtype: torch.dtype) -> Figures:
    with on_rungs({mechanism: rung}):
        rows = check_rows(rig, dtype, HostLayer)
        decode = check_decode(rig, dtype, HostLayer)
    return {**rows, **decode}
