"""Copies of streamed KV outside iterations, for the profiler."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from neo_desktop.engine.cuda.copies import host_memory
from neo_desktop.engine.execute.lane import Lane, Launcher
from neo_desktop.engine.execute.part import Record
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, Stage

IN_A_ROW = 4  # copies of layers
REGION_BYTES = 64 * 1024**2
_MEASURED = Stage("measured", 0, NO_SUB_BATCH, 0)


class SwapCopies:
    """K and V copies of layers to a device and back.

    Args:
        kv: device rows, [2, tokens, kv_heads, head_dim]; their content is lost.
        device: device of `kv`.
    """

    def __init__(self, kv: Tensor, device: torch.device) -> None:
        self._kv = kv
        pieces = max(-(-REGION_BYTES // kv.nbytes), 1)  # more than caches hold
        shape = (pieces, *kv.shape[1:])
        # Rows in host memory, of K and of V, [pieces, tokens, kv_heads, head_dim].
        self._homes = [
            host_memory(lambda pin: torch.ones(shape, dtype=kv.dtype, pin_memory=pin), device)
            for _ in range(2)
        ]

    def inward(self, tokens: int, turn: int) -> Record:
        """Return a recorder that copies K and V to the device, each layer from other host memory."""

        def copy(step: int) -> None:
            for kind in range(2):
                self._bring(kind, tokens, 2 * (turn * IN_A_ROW + step) + kind)

        def record(launcher: Launcher) -> None:
            for step in range(IN_A_ROW):
                launcher.wait((launcher.run(Lane.SWAP_IN, _MEASURED, partial(copy, step)),))

        return record

    def ways(self, lanes: Sequence[Lane]) -> Record:
        """Return a recorder that copies K in and V out, or one of both, with equal amounts.

        Args:
            lanes: SWAP_IN, SWAP_OUT or both, which do not wait for each other.
        """
        tokens = self._kv.shape[1]
        copies = {
            Lane.SWAP_IN: partial(self._bring, 0, tokens),
            Lane.SWAP_OUT: partial(self._store, 1, tokens),
        }

        def record(launcher: Launcher) -> None:
            steps = [(lane, step) for step in range(IN_A_ROW) for lane in lanes]
            launcher.wait(
                [launcher.run(lane, _MEASURED, partial(copies[lane], step)) for lane, step in steps]
            )

        return record

    def _bring(self, kind: int, tokens: int, piece: int) -> None:
        home = self._homes[kind]
        self._kv[kind, :tokens].copy_(home[piece % len(home), :tokens], non_blocking=True)

    def _store(self, kind: int, tokens: int, piece: int) -> None:
        home = self._homes[kind]
        home[piece % len(home), :tokens].copy_(self._kv[kind, :tokens], non_blocking=True)
