"""What a second GPU does in an iteration: it attends for its decodes, and stores what prompts leave there.

All of it is work of one lane, in order, which is a stream of that GPU:

    device   |linear 0,l|attention 0,l|linear 1,l|attention 1,l|linear 0,l+1| ..
    peer                |qkv 0,l|attention 0,l|o 0,l|   |qkv 1,l|attention 1,l|o 1,l| ..

q, k and v of decodes go there straight from where the model's GPU has computed them, and the output comes
back to where the next linear stages read it. Prompts are attended to by the model's GPU; their rows follow
behind the computation, and what precedes a chunk comes a layer ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from neo_desktop.engine.execute.lane import Lane, Recorder, Signal
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.execute.transfers import HostTransfer
from neo_desktop.engine.kv.layer import Rows
from neo_desktop.engine.kv.peer import PeerPool, across, copy_across
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.stages import State


@dataclass
class PeerDecodes:
    """Decodes of a sub-batch that a second GPU attends for. All tensors are in its memory."""

    rows: slice  # of the sub-batch
    pool: PeerPool
    config: ModelConfig
    block_tables: Tensor  # [decodes, max_blocks] int32
    context_lens: Tensor  # [decodes] int32
    slots: Tensor  # [decodes] int64: where the new token's k and v are stored
    attended: Signal | None = None  # in the layer reached: the output is where it is needed

    def submit(self, recorder: Recorder, layer: int, index: int, state: State, linear: Signal) -> None:
        """Give a layer's attention to the lane.

        Args:
            index: of the sub-batch.
            state: its.
            linear: the end of what makes q, k and v.
        """
        stage = Stage("second GPU's attention", layer, index, len(self.slots))
        self.attended = recorder.run(Lane.PEER, stage, partial(self.attend, layer, state), (linear,))

    def attend(self, layer: int, state: State) -> None:
        """Attend to a layer's: q, k and v of the state's rows, whose output comes back to it."""
        config, count = self.config, len(self.slots)
        rows = slice(self.rows.start, self.rows.start + count)  # without padding
        first_k, first_v = config.num_heads, config.num_heads + config.num_kv_heads
        with self.pool.beside_device():
            qkv = across(state.qkv[rows].view(count, -1, config.head_dim), self.pool.device)
            out = torch.empty_like(qkv[:, :first_k])
            self.pool.layer(layer).decode(
                qkv[:, :first_k],
                qkv[:, first_k:first_v],
                qkv[:, first_v:],
                self.slots,
                self.block_tables,
                self.context_lens,
                out,
                config.attention_scale,
                config.layer_windows[layer],
            )
            target = state.attention[rows]
            copy_across(out.view(target.shape), target)
            state.attention[rows.stop : self.rows.stop].zero_()  # padding


class ToPeer:
    """Rows that are stored there; as `ToHost`.

    Args:
        name: of its stages.
        index: of the sub-batch.
        pool: where they go.
        slots: theirs, [rows] int64 on its device.
    """

    transfers: Sequence[HostTransfer] = ()

    def __init__(self, name: str, index: int, pool: PeerPool, slots: Tensor) -> None:
        self._name, self._index = name, index
        self._pool, self._slots = pool, slots

    def send(self, recorder: Recorder, layer: int, rows: Rows, after: Sequence[Signal]) -> Signal:
        """Give a layer's to the lane; return when they have left."""
        stage = Stage(self._name, layer, self._index, len(self._slots))
        return recorder.run(Lane.PEER, stage, partial(self._write, layer, rows), after)

    def _write(self, layer: int, rows: Rows) -> None:
        with self._pool.beside_device():
            there = across(rows, self._pool.device)
            self._pool.layer(layer).write(there[0], there[1], self._slots)


class FromPeer:
    """Rows that are brought from there; arguments as of `ToPeer`."""

    transfers: Sequence[HostTransfer] = ()

    def __init__(self, name: str, index: int, pool: PeerPool, slots: Tensor) -> None:
        self._name, self._index = name, index
        self._pool, self._slots = pool, slots

    def bring(self, recorder: Recorder, layer: int, target: Rows, after: Sequence[Signal]) -> Signal:
        """Give a layer's to the lane; return when they have come to `target`, on the model's device."""
        stage = Stage(self._name, layer, self._index, len(self._slots))
        return recorder.run(Lane.PEER, stage, partial(self._read, layer, target), after)

    def _read(self, layer: int, target: Rows) -> None:
        with self._pool.beside_device():
            rows = torch.empty(target.shape, dtype=target.dtype, device=self._pool.device)
            self._pool.layer(layer).read(self._slots, rows)
            copy_across(rows, target)
