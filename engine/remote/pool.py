"""The engine's side: a worker's KV as an ordinary pool, whose layers attend over the network."""

import torch
from torch import Tensor

from neo_desktop.engine.kv.layer import DecodeRows, KVLayer, KVShape, Rows
from neo_desktop.engine.kv.storage import KVPool
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.remote.link import WorkerLink
from neo_desktop.engine.remote.session import CPU
from neo_desktop.models.config import ModelConfig


class RemoteLayer(KVLayer):
    """One layer of a worker's memory; all tensors are in this computer's host memory.

    All methods raise WorkerLostError if the worker no longer answers.
    """

    __slots__ = ("_index", "_link")

    def __init__(self, link: WorkerLink, index: int, block_size: int) -> None:
        self.block_size = block_size
        self.device = CPU
        self._link = link
        self._index = index

    def _bind(self, *parts: Tensor) -> None: ...

    @classmethod
    def allocate(
        cls, config: KVShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        """Return no tensors: the memory belongs to the worker."""
        return ()

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        self._link.store(self._index, slots, k, v)

    def read(self, slots: Tensor, out: Rows) -> None:
        self._link.read(self._index, slots, out)

    def decode(self, rows: DecodeRows) -> None:
        """Attend on the worker, which knows the layer's constants; see `KVLayer`."""
        self.ask(rows)
        self.answer(rows.out)

    def ask(self, rows: DecodeRows) -> None:
        """Send the inputs of `decode` without waiting; the answers must be received, in order."""
        assert rows.k is not None
        assert rows.v is not None
        self._link.ask(self._index, rows.q, rows.k, rows.v, rows.block_tables, rows.context_lens)

    def answer(self, out: Tensor) -> None:
        """Wait for the output of the oldest unanswered rows, [requests, heads, head_dim]."""
        self._link.answer(out)


class RemotePool(KVPool):
    """K and V in all blocks in a worker's memory.

    Args:
        dtype: the model's.
        link: open.
    """

    def __init__(
        self,
        tier: KVTier,
        config: ModelConfig,
        block_size: int,
        dtype: torch.dtype,
        link: WorkerLink,
    ) -> None:
        # Do not call the base constructor: this pool has no memory and no parts.
        self.worker = tier.name
        self.link = link
        self.kind = RemoteLayer
        # At construction: a worker may return with another number.
        self.num_blocks = link.num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = CPU
        self.parts = ()
        self.config = config
        self._layers = [RemoteLayer(link, index, block_size) for index in range(config.num_layers)]
