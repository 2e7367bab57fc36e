"""Times copies over the bus outside iterations: KV moves and streamed KV."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial

import torch
from torch import Tensor

from neo_desktop.engine.batch import BlockCopy
from neo_desktop.engine.cuda.copies import host_memory
from neo_desktop.engine.execute.host import Relays
from neo_desktop.engine.execute.lane import Lane, Launcher
from neo_desktop.engine.execute.moves import Moves
from neo_desktop.engine.execute.part import Record
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, Stage
from neo_desktop.engine.execute.transfers import TransferMemory
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.profiling.regions import Region
from neo_desktop.models.decoder import Decoder

IN_A_ROW = 4  # copies of layers
REGION_BYTES = 64 * 1024**2
REPEATS = 3
_MEASURED = Stage("measured", 0, NO_SUB_BATCH, 0)

# Runs a program and yields its seconds; see `StageTimer.run`.
Run = Callable[..., AbstractContextManager[float]]


class CopyTimer:
    """Times a layer's copies.

    Args:
        regions: measured blocks by tier.
        kv: device rows, [2, tokens, kv_heads, head_dim]; their content is lost.
        run: runs programs.
        num_layers: layers whose copies run back to back.
    """

    def __init__(
        self, decoder: Decoder, regions: Mapping[KVTier, Region], kv: Tensor, run: Run, num_layers: int
    ) -> None:
        config = decoder.config
        self._config, self._regions, self._run, self._num_layers = config, regions, run, num_layers
        row_shape = config.num_kv_heads, config.head_dim
        self._memory = TransferMemory(config.num_layers, row_shape, decoder.dtype, decoder.device)
        self._kv, self._device = kv, decoder.device

    def transfer_ms(self, tokens: int, turn: int, *, with_flags: bool) -> float:
        """Measure the copy of a layer's KV in whole blocks; the direction alternates."""
        tiers = MEASURED_TIERS if turn % 2 == 0 else MEASURED_TIERS[::-1]
        regions = [self._regions[tier] for tier in tiers]
        num_blocks = min(-(-tokens // BLOCK_SIZE), *(len(region.order) for region in regions))
        blocks = zip(*(region.blocks(num_blocks, turn) for region in regions), strict=True)
        storage = KVStorage({tier: self._regions[tier].pool_from(turn) for tier in tiers})
        copies = [BlockCopy(tiers[0], source, tiers[1], target) for source, target in blocks]
        self._memory.begin()
        moves = Moves(storage.copy_groups(copies), self._memory)

        def record(launcher: Launcher) -> None:
            moved = moves.submit(launcher, 0)
            for layer in range(1, self._num_layers):
                ahead = moves.submit(launcher, layer)
                launcher.wait(moved)
                moved = ahead
            launcher.wait(moved)

        relays = Relays(self._config, storage) if with_flags else None
        with self._run(record, relays=relays, transfers=moves.transfers) as seconds:
            return seconds * 1e3 / self._num_layers

    def swap_ms(self, tokens: int, turn: int) -> float:
        """Measure the copy of a layer's K and V, contiguous, from host memory to the device."""
        with self._run(self._copies.inward(min(tokens, self._kv.shape[1]), turn)) as seconds:
            return seconds * 1e3 / IN_A_ROW

    @torch.inference_mode()
    def duplex(self) -> float:
        """Measure the slowdown of streamed KV copies in both directions at once: 1 to 2."""

        def least_s(*lanes: Lane) -> float:
            times_s = []
            for _ in range(REPEATS):
                with self._run(self._copies.ways(lanes)) as seconds:
                    times_s.append(seconds)
            return min(times_s)

        one_way_s = max(least_s(Lane.SWAP_IN), least_s(Lane.SWAP_OUT))
        return min(max(least_s(Lane.SWAP_IN, Lane.SWAP_OUT) / one_way_s, 1.0), 2.0)

    @cached_property
    def _copies(self) -> "SwapCopies":
        return SwapCopies(self._kv, self._device)


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
