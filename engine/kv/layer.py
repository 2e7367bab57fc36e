"""One layer's K and V in one tier, addressed by rows and slots; implementations hide the memory layout."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from neo_desktop.models.attention import AttentionConfig, AttentionSpec
from neo_desktop.models.operators import Store

# K and V in one tensor, [kv_parts, tokens, kv_heads, head_dim], in the model's layout: the form for
# transfers. V is the last part: with one part K, of which the model uses the first numbers as values.
Rows = Tensor


class KVShape(AttentionConfig, Protocol):
    """The part of a model's configuration that determines the size of its KV."""

    @property
    def num_layers(self) -> int: ...  # with attention
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def num_heads(self) -> int: ...  # of queries
    @property
    def head_dim(self) -> int: ...
    @property
    def kv_parts(self) -> int: ...  # see `ModelConfig`
    @property
    def attention_sinks(self) -> bool: ...  # see `AttentionSpec`


class Partials(NamedTuple):
    """Partial results of decode attention over split contexts, see `kernels.dispatch.paged_decode`."""

    out: Tensor
    lse: Tensor


class DecodeRows(NamedTuple):
    """The tensors of decode attention in a layer: one new token per request."""

    q: Tensor  # [requests, heads, head_dim]
    block_tables: Tensor  # [requests, max_blocks] int32
    context_lens: Tensor  # [requests] int32, the new token included
    out: Tensor  # as q
    k: Tensor | None = None  # [requests, kv_heads, head_dim]; None: already stored
    v: Tensor | None = None  # as k
    # [requests], the target of k and v: the last slot per context. None: already stored, or the kernel for
    # host memory computes it.
    slots: Tensor | None = None
    # Returns memory for partial results, given the most tokens of a context; None: allocate.
    partials: Callable[[int], Partials] | None = None


class KVLayer(ABC):
    """K and V of one layer in all blocks, with the decode attention that runs next to them.

    A row's slot is `block * block_size + offset`. All argument tensors are on the layer's device.

    Args:
        parts: One layer of `allocate`'s result.
        spec: The constants of its attention, with sinks in fp32.
    """

    __slots__ = ("block_size", "device", "spec")

    fused_kv_append = False  # True if the kernel that makes rows stores them, False if `decode` does

    def __init__(
        self,
        parts: tuple[Tensor, ...],
        block_size: int,
        spec: AttentionSpec,
    ) -> None:
        self.block_size = block_size
        self.device = parts[0].device
        self.spec = spec
        self._bind(*parts)

    @abstractmethod
    def _bind(self, *parts: Tensor) -> None:
        """Keep the layer's memory."""

    @classmethod
    @abstractmethod
    def allocate(
        cls, config: KVShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        """Allocate uninitialized memory for all layers; each tensor is [num_layers, ...].

        Raises:
            ValueError: This kind of memory cannot hold KV of that dtype.
        """

    @abstractmethod
    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write rows to slots, [tokens] int64, all different."""

    @abstractmethod
    def read(self, slots: Tensor, out: Rows) -> None:
        """Copy the rows at slots, [tokens] int64, to `out`; slots never written have undefined content."""

    @classmethod
    def give_back(cls, parts: tuple[Tensor, ...], num_blocks: int) -> int:
        """Return the memory after the first blocks, whole runs, to the system; return the number of bytes.

        Raises:
            OSError: The system refuses.
        """
        return 0

    def fill(self, k: Tensor, v: Tensor, first: int = 0) -> None:
        """Write rows to the slots from `first` on, without waiting for a copy from host memory."""
        self.write(k, v, torch.arange(first, first + len(k), device=self.device))

    def store(self, slots: Tensor) -> Store | None:
        """Return the target of early row stores, with slots as in `operators.Store`; None: not supported."""
        return None

    @abstractmethod
    def decode(self, rows: DecodeRows) -> None:
        """Store one new token per request, and attend from it to the request's whole context."""


def slots_of(blocks: Tensor, block_size: int) -> Tensor:
    """Return all slots of blocks, [blocks] int64, in order: [blocks * block_size]."""
    return (blocks.unsqueeze(1) * block_size + torch.arange(block_size, device=blocks.device)).flatten()


def rows_shape(config: KVShape, count: int) -> tuple[int, int, int, int]:
    """Return the shape of `Rows` of `count` tokens."""
    return config.kv_parts, count, config.num_kv_heads, config.head_dim


def block_bytes(config: KVShape, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of K and V per block and layer, in any kind of memory; int8 includes the scales."""
    scale_bytes = torch.float32.itemsize if dtype is torch.int8 else 0
    rows = config.kv_parts * block_size * config.num_kv_heads
    return rows * (config.head_dim * dtype.itemsize + scale_bytes)
