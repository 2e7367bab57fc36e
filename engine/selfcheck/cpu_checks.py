"""Checks of CPU attention: every instruction set, memory type and thread mode."""

from collections.abc import Iterator
from functools import partial

import torch

from neo_desktop.engine.doctor.outcome import Figures
from neo_desktop.engine.fallbacks import MECHANISMS
from neo_desktop.engine.kv.host_layer import HostLayer
from neo_desktop.engine.selfcheck.check import Check
from neo_desktop.engine.selfcheck.kv_checks import check_decode, check_rows
from neo_desktop.engine.selfcheck.rig import Rig, on_levels

KERNEL_DEADLINE_S = 60.0


def cpu_checks(rig: Rig) -> Iterator[Check]:
    """Yield the checks of KV in host memory."""
    for level in MECHANISMS["isa"].levels:
        for dtype, what in ((rig.dtype, str(rig.dtype).removeprefix("torch.")), (torch.int8, "int8")):
            yield Check(
                f"cpu-attention-{level.name}-{what}",
                f"CPU attention, {level.what}, KV in {what}",
                "isa",
                level.name,
                KERNEL_DEADLINE_S,
                partial(_attention, rig, "isa", level.name, dtype),
            )
    for mechanism in ("huge_pages", "affinity"):
        for level in MECHANISMS[mechanism].levels:
            yield Check(
                f"{mechanism}-{level.name}",
                f"{MECHANISMS[mechanism].title}: {level.what}",
                mechanism,
                level.name,
                KERNEL_DEADLINE_S,
                partial(_attention, rig, mechanism, level.name, rig.dtype),
            )


def _attention(rig: Rig, mechanism: str, level: str, dtype: torch.dtype) -> Figures:
    with on_levels({mechanism: level}):
        rows = check_rows(rig, dtype, HostLayer)
        decode = check_decode(rig, dtype, HostLayer)
    return {**rows, **decode}
