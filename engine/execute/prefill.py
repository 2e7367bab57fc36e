"""Attention of prompt chunks: our own kernel on CPUs, the best working torch kernel on GPUs.

Chunks are attended to in groups with concatenated contexts:

    queries    [chunk a][chunk b][chunk c]
    contexts   [earlier a, chunk a][chunk b][earlier c, chunk c]

Each query sees its own context up to itself. If torch refuses to run a kernel, the next one replaces it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.engine.cuda.copies import upload
from neo_desktop.engine.cuda.errors import is_lost, is_out_of_memory
from neo_desktop.engine.execute.image_attention import NO_IMAGES, ImageSpans
from neo_desktop.engine.execute.prefill_kernels import (
    BELOW,
    PrefillKernel,
    by_products,
    causal_attention,
    efficient,
    flash,
    kernel_on,
    with_sinks,
)
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kv.layer import Rows
from neo_desktop.models.attention import AttentionSpec

PACKED_TOKENS = 4096  # most context tokens of a group, unless a single chunk has more


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt chunk: its rows in the sub-batch, and the slots of its context."""

    rows: slice
    start: int  # number of cached tokens before this chunk
    slots: Tensor  # [start + rows] int64 on the pool's device: slots of the earlier and the own tokens
    images: ImageSpans = NO_IMAGES

    @property
    def context_len(self) -> int:
        """Number of tokens up to the chunk's end."""
        return self.start + self.num_queries

    @property
    def num_queries(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def earlier_slots(self) -> Tensor:
        """Slots of the tokens before the chunk, [start] int64."""
        return self.slots[: self.start]


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """Adjacent chunks that are attended to together; every layer uses the same group."""

    chunks: tuple[Prefill, ...]
    slots: Tensor  # [contexts] int64 on the pool's device: slots of the contexts
    ends: Tensor  # [2, chunks + 1] int32: 0 and the ends of chunks; 0 and the ends of contexts

    @classmethod
    def of(cls, chunks: tuple[Prefill, ...]) -> Self:
        """Make a group with all tensors on the chunks' device."""
        lengths = [chunk.num_queries for chunk in chunks], [chunk.context_len for chunk in chunks]
        ends = [list(accumulate(numbers, initial=0)) for numbers in lengths]
        slots = torch.cat([chunk.slots for chunk in chunks])
        return cls(chunks, slots, upload(ends, torch.int32, slots.device))

    def attending_on(self, device: torch.device) -> Self:
        """Return the group for attention on a device other than the pool's."""
        return replace(self, ends=upload(self.ends, torch.int32, device))

    @property
    def rows(self) -> slice:
        """The chunks' rows of the sub-batch."""
        return slice(self.chunks[0].rows.start, self.chunks[-1].rows.stop)

    @property
    def has_earlier(self) -> bool:
        return any(chunk.start for chunk in self.chunks)

    def pack(self, kv: Rows, earlier: Sequence[Rows | None]) -> Rows:
        """Concatenate K and V of the contexts.

        Args:
            kv: [kv_parts, tokens, kv_heads, head_dim] of the sub-batch.
            earlier: For each chunk, the rows of the tokens before it; None if it has no earlier tokens.
        """
        if not self.has_earlier:
            return kv[:, self.rows]
        parts: list[Rows] = []
        for chunk, before in zip(self.chunks, earlier, strict=True):
            if before is not None:
                parts.append(before)
            parts.append(kv[:, chunk.rows])
        return torch.cat(parts, dim=1)

    def attend(
        self,
        q: Tensor,
        contexts: Rows,
        out: Tensor,
        spec: AttentionSpec,
    ) -> None:
        """Attend from the chunks to their contexts. All tensors are on q's device.

        Args:
            q: [tokens, heads, head_dim] of the sub-batch; `out` has the same shape.
            contexts: K and V [kv_parts, contexts, kv_heads, head_dim].

        Raises:
            RuntimeError: No kernel works, or the GPU failed or ran out of memory.
        """
        longest = max(chunk.context_len for chunk in self.chunks)
        windowed = spec.window is not None and spec.window < longest
        causal = spec if windowed else spec._replace(window=None)
        while True:
            level = fallbacks.level("prompt_attention")
            kernel = kernel_on(q.device, q.dtype, q.shape[2], windowed, level)
            if spec.softcap is not None and kernel is not PrefillKernel.NATIVE:
                kernel = PrefillKernel.MATH  # torch's kernels have no softcap
            try:
                self._attend_with(kernel, q, contexts, out, causal)
                break
            except RuntimeError as error:
                below = BELOW.get(kernel)
                if below is None or is_out_of_memory(error) or is_lost(error):
                    raise
                fallbacks.limit("prompt_attention", below, str(error).strip().partition("\n")[0])
        first = 0
        for chunk in self.chunks:
            if chunk.images.spans:
                context = contexts[:, first : first + chunk.context_len]
                chunk.images.attend(q[chunk.rows], context, out[chunk.rows], chunk.start, spec)
            first += chunk.context_len

    def _attend_with(
        self,
        kernel: PrefillKernel,
        q: Tensor,
        contexts: Rows,
        out: Tensor,
        spec: AttentionSpec,
    ) -> None:
        """Attend with a kernel; only MATH and NATIVE support a softcap."""
        context_lens, sinks = [chunk.context_len for chunk in self.chunks], spec.sinks
        keys, values = contexts[0], contexts[-1]
        if kernel is PrefillKernel.NATIVE:
            native.prompt_attention(
                q[self.rows],
                keys,
                values,
                self.ends,
                spec.scale,
                out[self.rows],
                window=spec.window or 0,
                sinks=None if sinks is None else sinks.float().contiguous(),
                softcap=spec.softcap or 0.0,
            )
            return
        if kernel is PrefillKernel.FLASH:
            queries = max(chunk.num_queries for chunk in self.chunks)
            attended, lse = flash(q[self.rows], keys, values, self.ends, queries, max(context_lens), spec)
            out[self.rows] = attended if sinks is None else with_sinks(attended, lse.t(), sinks)
            return
        pieces = torch.split(keys, context_lens), torch.split(values, context_lens)
        for chunk, k, v in zip(self.chunks, *pieces, strict=True):
            if kernel is PrefillKernel.MATH:
                out[chunk.rows] = by_products(q[chunk.rows], k, v, spec)
            elif kernel is PrefillKernel.EFFICIENT:
                attended, lse = efficient(q[chunk.rows], k, v, spec)
                out[chunk.rows] = attended if sinks is None else with_sinks(attended, lse, sinks)
            else:
                out[chunk.rows] = causal_attention(q[chunk.rows], k, v, spec)


def groups_of(chunks: Sequence[Prefill]) -> Iterator[PrefillGroup]:
    """Group chunks, so that short chunks need few launches and long chunks little memory."""
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
