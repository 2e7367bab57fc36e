"""A worker as one rank of a divided model knows it.

Each rank talks to each worker, for its own heads. When a connection is lost in the middle of an iteration,
its rank cannot leave it: the others would wait for its parts of sums. So it goes on with zeros, and in the
end all ranks agree to throw away what has come out (`execute.ranks.losses`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from neo_desktop.engine.placement import Place
from neo_desktop.engine.remote.heads import HeadGroup
from neo_desktop.engine.remote.link import Address, WorkerLink, WorkerLostError
from neo_desktop.engine.remote.shape import AttentionShape
from neo_desktop.models.rank import Rank


class OtherRanks(Protocol):
    """The other ranks, which have connections of their own."""

    def reach(self, place: Place, addresses: Sequence[Address], num_blocks: int) -> None:
        """Let each of them connect to a worker, too.

        Args:
            place: the worker's.
            addresses: where it listens; of a place that several have together, those of all.
            num_blocks: that this rank has there, and they must have.

        Raises:
            OSError: one of them cannot.
        """


@dataclass(frozen=True, slots=True)
class EngineRank:
    """A rank of an engine, as workers know it."""

    engine: str  # the same on all ranks, and no other engine's
    rank: Rank
    others: OtherRanks | None  # of rank 0; None: this rank is told when to connect


class RankLink:
    """Connections to a worker that never fail in an iteration; methods as of `WorkerLink`.

    Args:
        link: what may fail.
    """

    def __init__(self, link: WorkerLink | HeadGroup) -> None:
        self.name = link.name
        self.lost: WorkerLostError | None = None  # what has failed since `open`
        self._link = link

    @property
    def address(self) -> Address | str | None:
        """See the link, likewise the others."""
        return self._link.address

    @property
    def addresses(self) -> tuple[Address, ...]:  # noqa: D102
        return self._link.addresses

    @property
    def num_blocks(self) -> int:  # noqa: D102
        return self._link.num_blocks

    def open(self, shape: AttentionShape, sinks: Tensor | None, most_blocks: int) -> None:
        """Connect, while nobody uses it; raises as `WorkerLink.open`."""
        self._link.open(shape, sinks, most_blocks)
        self.lost = None

    def ask(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, block_tables: Tensor, context_lens: Tensor
    ) -> None:
        """Send rows, as long as nothing has failed."""
        if self.lost is None:
            try:
                self._link.ask(layer, q, k, v, block_tables, context_lens)
            except WorkerLostError as error:
                self.lost = error

    def answer(self, out: Tensor) -> None:
        """Wait for the output; zeros, once something has failed."""
        if self.lost is None:
            try:
                self._link.answer(out)
                return
            except WorkerLostError as error:
                self.lost = error
        out.zero_()

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store rows, as long as nothing has failed."""
        if self.lost is None:
            try:
                self._link.store(layer, slots, k, v)
            except WorkerLostError as error:
                self.lost = error

    def read(self, layer: int, slots: Tensor, out: Tensor) -> None:
        """Read rows; zeros, once something has failed."""
        if self.lost is None:
            try:
                self._link.read(layer, slots, out)
                return
            except WorkerLostError as error:
                self.lost = error
        out.zero_()

    def close(self) -> None:
        """See `WorkerLink`."""
        self._link.close()
