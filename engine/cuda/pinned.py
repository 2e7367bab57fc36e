"""Large pieces of host memory that a GPU copies from: pinned where they lie.

torch's own pinned memory is rounded up to a power of two, which for the weights of a model can be gigabytes.
"""

import logging
import math
import mmap
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from neo_desktop.engine.cuda.errors import is_lost
from neo_desktop.engine.huge_pages import ask_for_huge_pages, check_huge_pages
from neo_desktop.engine.ladder import ladder

logger = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable
NUM_PIECES = 8  # of a part: more would be given back more finely, but cut copies more often


class _Pages(mmap.mmap):
    """Memory that is pinned until nobody refers to it any more."""

    pinned_at: frozenset[int] = frozenset()  # addresses of its ranges that are

    def pin(self, address: int, num_bytes: int) -> RuntimeError | None:
        """Pin a range of it; return why it could not be pinned."""
        refusal = _refusal(lambda cudart: cudart.cudaHostRegister(address, num_bytes, _PORTABLE))
        if refusal is None:
            self.pinned_at |= {address}
        return refusal

    def unpin(self, address: int) -> RuntimeError | None:
        """Undo this for the range that begins there; return why it stays pinned."""
        refusal = _refusal(lambda cudart: cudart.cudaHostUnregister(address))
        if refusal is None:
            self.pinned_at -= {address}
        return refusal

    def __del__(self) -> None:
        for address in self.pinned_at:
            with suppress(RuntimeError):  # at the end of the process there may be no CUDA any more
                torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


_weights: WeakSet[_Pages] = WeakSet()  # of the models that are loaded


class PinnedPieces:
    """Host memory of several parts, each pinned in pieces, so that the last ones can be given back.

        part 0   | piece 0 | piece 1 | piece 2 | piece 3 |
        part 1   | piece 0 | piece 1 | piece 2 | piece 3 |
                                      nothing from here on is pinned

    CUDA undoes pinning of whole registered ranges only, and does not promise copies that reach from one into
    the next. So no copy may cross the border of a piece. If the system pins not all of it at first, all is
    pageable, and so is all other memory from then on.

    Args:
        num_parts: that have the same size.
        num_blocks: of a part.
        block_bytes: of a block.
        multiple: pieces are as many blocks as this, or several times as many.
    """

    def __init__(self, num_parts: int, num_blocks: int, block_bytes: int, multiple: int) -> None:
        # No two pieces share a page of the system.
        unit = math.lcm(multiple, mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, block_bytes))
        self.num_blocks = -(-num_blocks // unit) * unit  # of a part, with padding
        self.piece_blocks = max(-(-self.num_blocks // (unit * NUM_PIECES)), 1) * unit
        self._block_bytes = block_bytes
        part_bytes = self.num_blocks * block_bytes
        self._pages, memory = _advised(num_parts * part_bytes)
        # [parts, bytes] uint8; those of blocks from `num_pinned` on are not to be used.
        self.memory = memory.view(num_parts, part_bytes)
        self.changes = 0  # how often what is pinned became another
        self._is_told = False
        self.is_pinned = ladder.rung("host_memory") == "pinned"
        if self.is_pinned and (refusal := self._pin(self.num_blocks)) is not None:
            self._unpin(0)
            self.is_pinned = False
            ladder.limit(
                "host_memory", "pageable", f"{memory.nbytes / 1e9:.1f} GB cannot be pinned: {refusal}"
            )

    @property
    def num_pinned(self) -> int:
        """How many of the first blocks are pinned in all parts; all, if none is in pieces."""
        if not self.is_pinned:
            return self.num_blocks
        for first in range(0, self.num_blocks, self.piece_blocks):
            if any(address not in self._pages.pinned_at for address in self._addresses(first)):
                return first
        return self.num_blocks

    def unpin(self, begin: int) -> int:
        """Undo it for the pieces that lie wholly behind the first blocks; return where they begin.

        Raises:
            OSError: CUDA refuses.
        """
        begin = min(-(-begin // self.piece_blocks) * self.piece_blocks, self.num_blocks)
        if self.is_pinned and begin < self.num_pinned:
            self.changes += 1
            if (refusal := self._unpin(begin)) is not None:
                raise OSError(f"CUDA does not undo that it is pinned: {refusal}")
        return begin

    def pin(self, end: int) -> int:
        """Pin the first blocks again; return how many are: fewer than that if the system refuses."""
        if not self.is_pinned or end <= self.num_pinned:
            return self.num_pinned
        self.changes += 1
        refusal = self._pin(end)
        if refusal is not None:
            self._unpin(self.num_pinned)  # else some parts would have a piece that is of no use
            if not self._is_told:
                self._is_told = True
                logger.warning("memory cannot be pinned again, so the cache stays smaller: %s", refusal)
        return self.num_pinned

    def _addresses(self, first: int) -> list[int]:
        """Where the pieces lie, in all parts, that begin with a block."""
        return [part.data_ptr() + first * self._block_bytes for part in self.memory]

    def _pin(self, end: int) -> RuntimeError | None:
        for first in range(0, end, self.piece_blocks):
            num_bytes = min(self.piece_blocks, self.num_blocks - first) * self._block_bytes
            for address in self._addresses(first):
                if address in self._pages.pinned_at:
                    continue
                if (refusal := self._pages.pin(address, num_bytes)) is not None:
                    return refusal
        return None

    def _unpin(self, begin: int) -> RuntimeError | None:
        for first in reversed(range(begin, self.num_blocks, self.piece_blocks)):
            for address in self._addresses(first):
                if address not in self._pages.pinned_at:
                    continue
                if (refusal := self._pages.unpin(address)) is not None:
                    return refusal
        return None


def weight_bytes(nbytes: int) -> Tensor:
    """Return bytes for weights, likewise; of those that are not pinned `execute.weight_stream` knows."""
    pages, memory = _advised(nbytes)
    _weights.add(pages)
    refusal = None
    if ladder.rung("host_memory") == "pinned":
        refusal = pages.pin(memory.data_ptr(), len(pages))
    if refusal is not None:
        logger.debug("%.1f GB of weights are not pinned: %s", nbytes / 1e9, refusal)
    return memory


def check_weight_pages() -> None:
    """Tell whether the weights that were loaded have the huge pages that they asked for."""
    if _weights:
        check_huge_pages([torch.frombuffer(pages, dtype=torch.uint8) for pages in _weights])


def _advised(nbytes: int) -> tuple[_Pages, Tensor]:
    """Return memory that is not pinned, and what keeps it.

    It is private: shared memory gets no huge pages, and the system does not take its pages back for good.
    After a fork, a process that writes to a private page gets another one than the GPU reads. So children do
    not have this memory.
    """
    pages = _Pages(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):
        pages.madvise(mmap.MADV_DONTFORK)
    memory = torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
    ask_for_huge_pages(memory)
    return pages, memory


def _refusal(call: Callable[[Any], int]) -> RuntimeError | None:
    """Call a function of CUDA's runtime that returns an error number; return why it did not do it."""
    try:
        number = int(call(torch.cuda.cudart()))  # type: ignore[no-untyped-call]
        if number:
            raise RuntimeError(f"CUDA error {number}")
    except RuntimeError as error:
        if is_lost(error):
            raise
        _forget_refusal()
        return error
    return None


def _forget_refusal() -> None:
    """Take the error from CUDA, which would report it to the next caller: torch asks after each launch."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        if is_lost(error):
            raise
