"""Options of the measurement: shapes, batches, number formats."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from neo_desktop import native
from neo_desktop.engine.kv.layout import BLOCK_SIZE, BLOCKS_PER_RUN

KV_DTYPES = (torch.float16, torch.bfloat16, torch.int8)
GROUPS = (1, 4, 8)  # query heads per KV head
HEAD_DIMS = (64, 128)
CONTEXT_TOKENS = (512, 2048, 8192, 32768)  # each with BATCH requests, and with those that fill the cache
BATCH = 8
LONG, SHORT = (1, 32768), (256, 64)  # requests and tokens: one long request alone, many short ones
PAGE_TOKENS = BLOCKS_PER_RUN * BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Options:
    """The KV's number format, threads, and the order of blocks."""

    dtype: torch.dtype = torch.float16
    num_threads: int = 0  # 0: all cores but two if more than four exist, else all
    # True: a request's blocks are scattered one by one, as in an engine whose memory has long been full.
    # False: whole runs of blocks are scattered, as the engine allocates them while blocks are idle.
    fragmented: bool = False

    @property
    def blocks_together(self) -> int:
        """Blocks of a request that are contiguous in memory."""
        return 1 if self.fragmented else BLOCKS_PER_RUN

    @property
    def threads(self) -> int:
        """Threads of every measurement; the default leaves two cores to the GPU driver and the server."""
        cores = native.num_usable_cpus()
        return self.num_threads or (cores - 2 if cores > 4 else cores)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of queries and outputs. bf16 holds int8 exactly: the kernels have dot products for both."""
        return torch.bfloat16 if self.dtype is torch.int8 else self.dtype

    def num_pieces(self, tokens: int) -> int:
        """Return the pieces of memory of a request: blocks or whole runs."""
        return -(-tokens // (BLOCK_SIZE * self.blocks_together))

    def shapes(self, group: int, head_dim: int, num_blocks: int) -> Iterator["Shape | None"]:
        """Yield every case of one group and head_dim; None for one that exceeds `num_blocks`."""
        num_pieces = num_blocks // self.blocks_together
        wanted = [
            (batch, tokens)
            for tokens in CONTEXT_TOKENS
            for batch in (BATCH, max(1, num_pieces // self.num_pieces(tokens)))
        ]
        for batch, tokens in dict.fromkeys([*wanted, LONG, SHORT]):
            fits = batch * self.num_pieces(tokens) <= num_pieces
            yield Shape(group, head_dim, batch, tokens) if fits else None


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of one call; all its requests are equally long."""

    group: int  # query heads per KV head
    head_dim: int
    batch: int
    context_tokens: int

    @property
    def kv_heads(self) -> int:
        """KV heads of known models with this group."""
        return kv_heads(self.group)

    @property
    def rows(self) -> int:
        """Number of keys over requests and KV heads, which is also that of values."""
        return self.batch * self.context_tokens * self.kv_heads

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that a call reads: keys, values and, for int8, their scales."""
        return 2 * self.rows * row_bytes(self.head_dim, dtype)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of a call."""
        return 2 * self.rows * self.head_dim * self.group


def kv_heads(group: int) -> int:
    """Return the KV heads of Llama 2 7B, or of Llama 3 8B and 70B."""
    return 32 if group == 1 else 8


def row_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one key or value."""
    return head_dim * dtype.itemsize + (torch.float32.itemsize if dtype is torch.int8 else 0)
