"""Attention of prompt chunks, with the best kernel that torch has for a device.

Chunks are attended to in groups, whose contexts lie one after the other:

    queries    | chunk a | chunk b | chunk c |
    contexts   | earlier a, chunk a | chunk b | earlier c, chunk c |

Each query sees its own context up to itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from neo_desktop.engine.cuda.copies import upload
from neo_desktop.engine.kv.layer import Rows

PACKED_TOKENS = 8192  # whose contexts make a group, unless one chunk's alone has more
BOTTOM_RIGHT = 2  # of the memory-efficient kernel: the last query sees the last key


class PrefillKernel(StrEnum):
    """What computes prefill attention."""

    FLASH = "flash"  # all chunks of a group in one launch
    EFFICIENT = "efficient"  # memory-efficient, one launch for each chunk
    SDPA = "sdpa"  # whatever torch chooses, with a mask


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt chunk: rows of the sub-batch, where its KV lies, and what precedes it."""

    rows: slice
    start: int  # tokens in the cache before this chunk
    slots: Tensor  # [start + rows] int64 on the pool's device: where these tokens and the chunk's own are

    @property
    def context_len(self) -> int:
        """Tokens up to the chunk's end."""
        return self.start + self.num_queries

    @property
    def num_queries(self) -> int:
        """Tokens of the chunk."""
        return int(self.rows.stop - self.rows.start)

    @property
    def earlier_slots(self) -> Tensor:
        """Where the tokens before the chunk are, [start] int64."""
        return self.slots[: self.start]


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """Chunks, adjacent in the sub-batch, that are attended to together; built once, used by every layer."""

    chunks: tuple[Prefill, ...]
    slots: Tensor  # [contexts] int64 on the pool's device: where all contexts are
    ends: Tensor  # [2, chunks + 1] int32: 0 and the ends of chunks; 0 and the ends of contexts

    @classmethod
    def of(cls, chunks: tuple[Prefill, ...]) -> Self:
        """Make a group, all of whose tensors are where the chunks' are."""
        lengths = [chunk.num_queries for chunk in chunks], [chunk.context_len for chunk in chunks]
        ends = [list(accumulate(numbers, initial=0)) for numbers in lengths]
        slots = torch.cat([chunk.slots for chunk in chunks])
        return cls(chunks, slots, upload(ends, torch.int32, slots.device))

    def attending_on(self, device: torch.device) -> Self:
        """Return the group for attention on a device that is not the pool's."""
        return replace(self, ends=upload(self.ends, torch.int32, device))

    @property
    def rows(self) -> slice:
        """The chunks' rows of the sub-batch."""
        return slice(self.chunks[0].rows.start, self.chunks[-1].rows.stop)

    @property
    def has_earlier(self) -> bool:
        """Whether anything precedes any chunk."""
        return any(chunk.start for chunk in self.chunks)

    def pack(self, k: Tensor, v: Tensor, earlier: Sequence[Rows | None]) -> tuple[Tensor, Tensor]:
        """Return K and V of the contexts.

        Args:
            k: [tokens, kv_heads, head_dim] of the sub-batch; v likewise.
            earlier: for each chunk the rows of the tokens before it; None if there are none.
        """
        if not self.has_earlier:
            return k[self.rows], v[self.rows]
        parts: list[tuple[Tensor, Tensor]] = []
        for chunk, before in zip(self.chunks, earlier, strict=True):
            if before is not None:
                parts.append((before[0], before[1]))
            parts.append((k[chunk.rows], v[chunk.rows]))
        keys, values = zip(*parts, strict=True)
        return torch.cat(keys), torch.cat(values)

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, scale: float, window: int | None
    ) -> None:
        """Attend from the chunks to their contexts, all of it on q's device.

        Args:
            q: [tokens, heads, head_dim] of the sub-batch; out likewise.
            keys: [contexts, kv_heads, head_dim]; values likewise.
            scale: the factor on q·k.
            window: how many of the last tokens each query sees, itself included; None: all.
        """
        context_lens = [chunk.context_len for chunk in self.chunks]
        if window is not None and window >= max(context_lens):
            window = None
        kernel = kernel_on(q.device, q.dtype, q.shape[2], window is not None)
        if kernel is PrefillKernel.FLASH:
            queries = max(chunk.num_queries for chunk in self.chunks)
            out[self.rows] = _flash(
                q[self.rows], keys, values, self.ends, queries, max(context_lens), scale, window
            )
            return
        contexts = zip(torch.split(keys, context_lens), torch.split(values, context_lens), strict=True)
        for chunk, (k, v) in zip(self.chunks, contexts, strict=True):
            if kernel is PrefillKernel.EFFICIENT:
                out[chunk.rows] = _efficient(q[chunk.rows], k, v, scale)
            else:
                out[chunk.rows] = causal_attention(q[chunk.rows], k, v, scale, window)


def groups_of(chunks: Sequence[Prefill]) -> Iterator[PrefillGroup]:
    """Put chunks into groups, so that many short ones need few launches, and long ones little memory."""
    group: list[Prefill] = []
    tokens = 0
    for chunk in chunks:
        if group and tokens + chunk.context_len > PACKED_TOKENS:
            yield PrefillGroup.of(tuple(group))
            group, tokens = [], 0
        group.append(chunk)
        tokens += chunk.context_len
    if group:
        yield PrefillGroup.of(tuple(group))


def choose_kernel(
    capability: tuple[int, int] | None, dtype: torch.dtype, head_dim: int, windowed: bool
) -> PrefillKernel:
    """Return the best kernel.

    SDPA's own choice is not relied on, since beside a mask, and with grouped queries below 8.0, it falls back
    to a kernel that writes all scores to memory.

    Args:
        capability: of the GPU; None: a CPU.
        dtype: of queries, keys and values.
        head_dim: of a head.
        windowed: whether a window hides part of the context.
    """
    if capability is None:
        return PrefillKernel.SDPA
    is_16_bit = dtype in (torch.float16, torch.bfloat16)
    if capability >= (8, 0) and is_16_bit and head_dim % 8 == 0 and head_dim <= 256:
        return PrefillKernel.FLASH
    return PrefillKernel.SDPA if windowed else PrefillKernel.EFFICIENT


@lru_cache
def kernel_on(device: torch.device, dtype: torch.dtype, head_dim: int, windowed: bool) -> PrefillKernel:
    """Choose for a device, with the torch that is installed.

    Raises:
        RuntimeError: this torch lacks the operator; all versions that neo-desktop accepts should have it.
    """
    if device.type == "cpu":
        return choose_kernel(None, dtype, head_dim, windowed)
    kernel = choose_kernel(torch.cuda.get_device_capability(device), dtype, head_dim, windowed)
    if kernel is PrefillKernel.FLASH and not torch.backends.cuda.is_flash_attention_available():
        # Some builds of torch leave it out; the next best is what an older GPU gets.
        kernel = choose_kernel((7, 5), dtype, head_dim, windowed)
    check_operator(kernel)
    return kernel


def check_operator(kernel: PrefillKernel) -> None:
    """Check that torch has what a kernel is called with.

    Raises:
        RuntimeError: it does not.
    """
    needed = {
        PrefillKernel.FLASH: ("_flash_attention_forward", {"window_size_left", "window_size_right", "scale"}),
        PrefillKernel.EFFICIENT: ("_efficient_attention_forward", {"custom_mask_type", "scale"}),
    }
    if kernel not in needed:
        return
    name, arguments = needed[kernel]
    operator = getattr(torch.ops.aten, name, None)
    found = set() if operator is None else {argument.name for argument in operator.default._schema.arguments}
    if not arguments <= found:
        raise RuntimeError(f"torch {torch.__version__} has no usable {name}: install a version from 2.11 on")


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    max_queries: int,
    max_context: int,
    scale: float,
    window: int | None,
) -> Tensor:
    # What torch.nn.attention.varlen calls. That must be told of grouped queries from 2.12 on and cannot be
    # before, and importing it takes a second.
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        ends[0],
        ends[1],
        max_queries,
        max_context,
        0.0,  # dropout
        window is None,  # causal; a window says it by its right side
        False,  # no mask is to be returned
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )[0]
    return out


def _efficient(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    # What SDPA calls, which has no way to say that the last query sees the last key without a mask.
    queries, keys, values = _by_kv_head(q, k, v)
    out: Tensor = torch.ops.aten._efficient_attention_forward(
        queries.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        None,  # bias
        None,
        None,
        None,
        None,
        0.0,  # dropout
        BOTTOM_RIGHT,
        scale=scale,
    )[0]
    return out.transpose(0, 1).flatten(1, 2)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Attend from the last `len(q)` tokens of a context to all tokens up to each of them.

    Args:
        q: [queries, heads, head_dim]
        k: [context, kv_heads, head_dim]
        v: [context, kv_heads, head_dim]
        scale: the factor on q·k.
        window: how many of the last tokens each query sees, itself included; None: all.
    """
    num_queries, num_keys = len(q), len(k)
    is_whole = num_queries == num_keys and (window is None or window >= num_keys)
    mask = None
    if not is_whole:
        positions = torch.arange(num_keys - num_queries, num_keys, device=q.device).unsqueeze(1)
        past = torch.arange(num_keys, device=q.device)
        mask = past <= positions
        if window is not None:
            mask &= past > positions - window
    out = F.scaled_dot_product_attention(
        *_by_kv_head(q, k, v), attn_mask=mask, is_causal=is_whole, scale=scale
    )
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def _by_kv_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """View all as [kv_heads, group, tokens, head_dim]: the heads of K and V repeat without being copied.

    The memory-efficient kernel knows no grouped queries: with `enable_gqa`, SDPA on a GPU older than 8.0 or
    in float32 falls back to a kernel that writes all scores to memory.
    """
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    queries = torch.unflatten(q, 1, (kv_heads, group)).permute(1, 2, 0, 3)
    keys, values = (x.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for x in (k, v))
    return queries, keys, values
