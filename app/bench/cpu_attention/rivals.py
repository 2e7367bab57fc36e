"""What others reach on the same work: torch's scaled_dot_product_attention, llama.cpp's flash attention.

Both get keys and values that are gathered already, contiguous per request and head: better than they would
find them. Only the attention itself is timed. It can be a hundred times slower than the memory allows, so a
case starts with one request and doubles its batch while time is left; what counts is bytes per second.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from neo_desktop.app.bench.cpu_attention.options import CpuAttentionOptions, Shape
from neo_desktop.app.bench.cpu_attention.pool import Pool, seeded
from neo_desktop.app.bench.cpu_attention.reference import relative_error
from neo_desktop.app.bench.cpu_attention.report import RivalResult

_CALLS = 3  # of the batch that counts, if one alone does not take too long


class Rival(Protocol):
    """Another implementation of decode attention."""

    @property
    def name(self) -> str:
        """For people."""

    def prepared(
        self, q: Tensor, k: Tensor, v: Tensor, num_threads: int
    ) -> AbstractContextManager[Callable[[], Tensor]]:
        """Get ready to attend.

        Args:
            q: [batch, heads, head_dim].
            k: [batch, kv_heads, tokens, head_dim], contiguous.
            v: as k.
            num_threads: how many threads it may use.

        Yields:
            A function that does all the work and returns [batch, heads, head_dim].
        """


class TorchSdpa:
    """torch's own choice of kernel."""

    name = "torch SDPA"

    @contextmanager
    def prepared(self, q: Tensor, k: Tensor, v: Tensor, num_threads: int) -> Iterator[Callable[[], Tensor]]:
        """As Rival says."""
        grouped = q.shape[1] != k.shape[1]

        def attend() -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                q.unsqueeze(2), k, v, enable_gqa=grouped
            ).squeeze(2)

        threads_before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            yield attend
        finally:
            torch.set_num_threads(threads_before)


def measure_rival(
    rival: Rival, pool: Pool, options: CpuAttentionOptions, shape: Shape, seconds: float
) -> RivalResult:
    """Call it for about so long; at least once."""
    deadline = time.perf_counter() + seconds
    turn, error = 0, 0.0

    def timed(batch: int) -> tuple[float, float]:
        """Return seconds and the share of the reads around them."""
        nonlocal turn, error
        turn += 1
        part = replace(shape, batch=batch)
        k, v = pool.gathered(part, turn)
        q = torch.randn(batch, shape.kv_heads * shape.group, shape.head_dim, generator=seeded())
        q = q.to(options.compute_dtype)
        with rival.prepared(q, k, v, options.threads) as attend:
            read_before = pool.read_bytes_per_s(turn)
            start = time.perf_counter()
            out = attend()
            taken = time.perf_counter() - start
            read_after = pool.read_bytes_per_s(turn + 1)
        if turn == 1:
            error = relative_error(out[0, : shape.group], q[0, : shape.group], k[0, 0], v[0, 0])
        return taken, 2 * part.kv_bytes(options.dtype) / taken / (read_before + read_after)

    batch = 1
    calls = [timed(batch)]
    while batch < shape.batch and time.perf_counter() + 2 * _CALLS * calls[-1][0] < deadline:
        batch = min(2 * batch, shape.batch)
        calls = [timed(batch)]
    while time.perf_counter() + calls[-1][0] < deadline:
        calls.append(timed(batch))
    kv_bytes = replace(shape, batch=batch).kv_bytes(options.dtype)
    return RivalResult(
        batch=batch,
        calls=len(calls),
        gb_per_s=kv_bytes / statistics.median(seconds for seconds, _ in calls) / 1e9,
        fraction=statistics.median(fraction for _, fraction in calls),
        relative_error=error,
    )
