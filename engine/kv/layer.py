"""One layer's K and V in one tier, by rows and slots: how they lie in memory is hidden."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from neo_desktop.models.operators import Store

# K and V in one piece, [2, tokens, kv_heads, head_dim], as they travel: of each token what models make.
Rows = Tensor


class KVShape(Protocol):
    """What memory for KV depends on; models' configurations have it."""

    @property
    def num_layers(self) -> int:
        """Layers that attend."""

    @property
    def num_kv_heads(self) -> int:
        """Heads of K and V."""

    @property
    def num_heads(self) -> int:
        """Heads of queries."""

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""

    @property
    def attention_sinks(self) -> bool:
        """Whether heads attend to one more token, see `KVLayer.decode`."""

    @property
    def attention_softcap(self) -> float | None:
        """Where scores level off, see `KVLayer.decode`; None: nowhere."""


class Partials(NamedTuple):
    """What decode attention works in where it cuts contexts, see `kernels.dispatch.paged_decode`."""

    out: Tensor
    lse: Tensor


class KVLayer(ABC):
    """K and V of all blocks of one layer, and the decode attention over them, next to them.

    Rows lie in slots, `block * block_size + offset`. All tensors that come and go are on the layer's device.

    Args:
        parts: the memory: one layer of what `allocate` returned.
        block_size: tokens per block.
        sinks: [heads] fp32, of the layer: see `decode`; None: it has none.
        softcap: see `decode`; None: it has none.
    """

    __slots__ = ("block_size", "device", "sinks", "softcap")

    fused_kv_append = False  # whether rows are stored where they are made, and not by `decode`

    def __init__(
        self,
        parts: tuple[Tensor, ...],
        block_size: int,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> None:
        self.block_size = block_size
        self.device = parts[0].device
        self.sinks = sinks
        self.softcap = softcap

    @classmethod
    @abstractmethod
    def allocate(
        cls, config: KVShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        """Return memory for all layers, [num_layers, ...] each; it may hold anything.

        Raises:
            ValueError: this kind of memory cannot hold KV of that dtype.
        """

    @abstractmethod
    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Put rows into slots, [tokens] int64, all different."""

    @abstractmethod
    def read(self, slots: Tensor, out: Rows) -> None:
        """Copy the rows of slots, [tokens] int64, to `out`; of slots never written it may be anything."""

    @classmethod
    def give_back(cls, parts: tuple[Tensor, ...], num_blocks: int) -> int:
        """Give the memory behind the first blocks back to the system, as far as this kind can.

        Args:
            parts: what `allocate` returned.
            num_blocks: that are kept, whole runs.

        Returns:
            The bytes that were given back. OSError: the system refuses.
        """
        return 0

    def fill(self, k: Tensor, v: Tensor, first: int = 0) -> None:
        """Put rows into the slots from `first` on, without waiting for them to come from host memory."""
        self.write(k, v, torch.arange(first, first + len(k), device=self.device))

    def store(self, slots: Tensor) -> Store | None:
        """Return where rows go that are stored early, if they are; slots as of `operators.Store`."""
        return None

    @abstractmethod
    def decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        slots: Tensor | None,
        block_tables: Tensor,
        context_lens: Tensor,
        out: Tensor,
        scale: float,
        window: int | None,
        partials: Callable[[int], Partials] | None = None,
    ) -> None:
        """Store one new token per request, and attend from it to the request's whole context.

        A head of a layer with sinks attends to one more token, with that score and a value of zero.
        In a layer with a softcap, the score s of each other token becomes softcap * tanh(s / softcap).

        Args:
            q: [requests, heads, head_dim]; out likewise.
            k: [requests, kv_heads, head_dim]; v likewise. None: they are stored already.
            slots: [requests]: where k and v go, the last slot of each context. None: host memory's kernel
                finds it, or they are stored already.
            block_tables: [requests, max_blocks] int32
            context_lens: [requests] int32, the new token included.
            scale: the factor on q·k.
            window: how many of the last tokens are attended to; None: all.
            partials: gives memory for parts of contexts of up to so many tokens; None: it is taken anew.
        """


def slots_of(blocks: Tensor, block_size: int) -> Tensor:
    """Return all slots of blocks, [blocks] int64, in order: [blocks * block_size]."""
    return (blocks.unsqueeze(1) * block_size + torch.arange(block_size, device=blocks.device)).flatten()


def block_bytes(config: KVShape, block_size: int, dtype: torch.dtype) -> int:
    """Return what K and V of one block take in one layer, in any kind of memory; of int8 with the scales."""
    scale_bytes = torch.float32.itemsize if dtype is torch.int8 else 0
    return 2 * block_size * config.num_kv_heads * (config.head_dim * dtype.itemsize + scale_bytes)
