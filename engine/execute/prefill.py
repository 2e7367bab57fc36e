"""Attention of prompt chunks: our own kernel on CPUs, on GPUs the best torch kernel that works there.

Chunks are attended to in groups, whose contexts lie one after the other:

    queries    | chunk a | chunk b | chunk c |
    contexts   | earlier a, chunk a | chunk b | earlier c, chunk c |

Each query sees its own context up to itself. A kernel that torch refuses to run gives way to the next one.
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

PACKED_TOKENS = 4096  # whose contexts make a group, unless one chunk's alone has more


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

    def pack(self, kv: Rows, earlier: Sequence[Rows | None]) -> Rows:
        """Return K and V of the contexts.

        Args:
            kv: [2, tokens, kv_heads, head_dim] of the sub-batch.
            earlier: for each chunk the rows of the tokens before it; None if there are none.
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
        scale: float,
        window: int | None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> None:
        """Attend from the chunks to their contexts, all of it on q's device.

        Args:
            q: [tokens, heads, head_dim] of the sub-batch; out likewise.
            contexts: K and V [2, contexts, kv_heads, head_dim].
            scale: the factor on q·k.
            window: how many of the last tokens each query sees, itself included; None: all.
            sinks: [heads]: the score of one more token for each head, whose value is zero; None: there is
                no such token.
            softcap: the score s of each other token becomes softcap * tanh(s / softcap); None: it does not.

        Raises:
            RuntimeError: no kernel can do it, or the GPU failed or has no memory left.
        """
        windowed = window is not None and window < max(chunk.context_len for chunk in self.chunks)
        while True:
            level = fallbacks.level("prompt_attention")
            kernel = kernel_on(q.device, q.dtype, q.shape[2], windowed, level)
            if softcap is not None and kernel is not PrefillKernel.NATIVE:
                kernel = PrefillKernel.MATH  # no kernel of torch caps scores
            try:
                self._attend_with(kernel, q, contexts, out, scale, window, sinks, softcap)
                return
            except RuntimeError as error:
                below = BELOW.get(kernel)
                if below is None or is_out_of_memory(error) or is_lost(error):
                    raise
                fallbacks.limit("prompt_attention", below, str(error).strip().partition("\n")[0])

    def _attend_with(
        self,
        kernel: PrefillKernel,
        q: Tensor,
        contexts: Rows,
        out: Tensor,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
        softcap: float | None = None,
    ) -> None:
        """Attend with a kernel; only products and the native kernel know of a softcap."""
        context_lens = [chunk.context_len for chunk in self.chunks]
        if window is not None and window >= max(context_lens):
            window = None
        if kernel is PrefillKernel.NATIVE:
            native.prompt_attention(
                q[self.rows],
                contexts[0],
                contexts[1],
                self.ends,
                scale,
                out[self.rows],
                window=window or 0,
                sinks=None if sinks is None else sinks.float().contiguous(),
                softcap=softcap or 0.0,
            )
            return
        if kernel is PrefillKernel.FLASH:
            queries = max(chunk.num_queries for chunk in self.chunks)
            found, lse = flash(
                q[self.rows], contexts[0], contexts[1], self.ends, queries, max(context_lens), scale, window
            )
            out[self.rows] = found if sinks is None else with_sinks(found, lse.t(), sinks)
            return
        for chunk, (k, v) in zip(self.chunks, torch.split(contexts, context_lens, dim=1), strict=True):
            if kernel is PrefillKernel.MATH:
                out[chunk.rows] = by_products(q[chunk.rows], k, v, scale, window, sinks, softcap)
            elif kernel is PrefillKernel.EFFICIENT:
                found, lse = efficient(q[chunk.rows], k, v, scale, needs_lse=sinks is not None)
                out[chunk.rows] = found if sinks is None else with_sinks(found, lse, sinks)
            else:
                out[chunk.rows] = causal_attention(q[chunk.rows], k, v, scale, window, sinks)


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
