"""Workers that share a KV tier: each has some of the heads of every request (Lamina, section 5).

All workers attend for every request, so their load is always equal. Each has every block, with its own KV
heads, and all receive the same block tables.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from neo_desktop.engine.kv.transfer import HostBuffer
from neo_desktop.engine.remote.link import WorkerLink
from neo_desktop.engine.remote.shape import AttentionShape

CPU = torch.device("cpu")


def check_heads(num_kv_heads: int, num_workers: int) -> None:
    """Raise ValueError if KV heads cannot be divided evenly."""
    if num_kv_heads % num_workers:
        raise ValueError(
            f"{num_kv_heads} KV heads cannot be divided among {num_workers} workers: choose a number of "
            "workers that divides them, or give each worker whole requests (worker_partition 'requests')"
        )


class HeadGroup:
    """Connections to several workers with the interface of one `WorkerLink`.

    If one worker is lost, all KV is lost: the other workers' heads are useless alone.

    Args:
        name: of the tier; all links share it.
        links: one per worker, in the order of their heads; at least one.
    """

    def __init__(self, name: str, links: Sequence[WorkerLink]) -> None:
        self.name = name
        self._links = links
        self._out, self._rows = HostBuffer(CPU), HostBuffer(CPU)

    @property
    def address(self) -> str | None:
        """Addresses of the workers, for display; None: all are unknown."""
        return ", ".join(str(each.address) for each in self._links if each.address is not None) or None

    @property
    def num_blocks(self) -> int:
        """Blocks available on every worker."""
        return min(each.num_blocks for each in self._links)

    def open(self, shape: AttentionShape, sinks: Tensor | None, most_blocks: int) -> None:
        """Connect to all workers; raises the errors of `WorkerLink.open`."""
        count = len(self._links)
        check_heads(shape.num_kv_heads, count)
        part = replace(shape, num_heads=shape.num_heads // count, num_kv_heads=shape.num_kv_heads // count)
        try:
            for number, link in enumerate(self._links):
                heads = slice(number * part.num_heads, (number + 1) * part.num_heads)
                link.open(part, None if sinks is None else sinks[:, heads], most_blocks)
        except BaseException:
            self.close()
            raise

    def _parts(self, *tensors: Tensor) -> Iterator[tuple[WorkerLink, Sequence[Tensor]]]:
        """Yield each worker with its heads, the second to last dimension of every tensor."""
        divided = (each.chunk(len(self._links), dim=-2) for each in tensors)
        return zip(self._links, zip(*divided, strict=True), strict=True)

    def ask(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, block_tables: Tensor, context_lens: Tensor
    ) -> None:
        """Send each worker the rows of its heads."""
        for link, (part_q, part_k, part_v) in self._parts(q, k, v):
            link.ask(layer, part_q, part_k, part_v, block_tables, context_lens)

    def answer(self, out: Tensor) -> None:
        """Wait for the output of every head."""
        for link, (target,) in self._parts(out):
            part_out = self._out.view(tuple(target.shape), target.dtype)
            link.answer(part_out)
            target.copy_(part_out)

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store each worker's heads of the rows."""
        for link, (part_k, part_v) in self._parts(k, v):
            link.store(layer, slots, part_k, part_v)

    def read(self, layer: int, slots: Tensor, out: Tensor) -> None:
        """Read the rows of every head."""
        for link, (target,) in self._parts(out):
            rows = self._rows.view(tuple(target.shape), target.dtype)
            link.read(layer, slots, rows)
            target.copy_(rows)

    def close(self) -> None:
        """Close all connections; thread-safe, may be called again."""
        for link in self._links:
            link.close()
