"""Host memory reserve: caches return memory to other programs, and grow again when there is plenty."""

import logging
import time
from collections.abc import Callable, Mapping

from neo_desktop.engine.kv.cache import KVCache, PoolSize
from neo_desktop.engine.kv.layout import BLOCKS_PER_RUN, full_runs
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.options import GIB, EngineOptions
from neo_desktop.engine.profiling.hardware import host_memory
from neo_desktop.engine.request import Request
from neo_desktop.engine.schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)

RESERVE_SHARE = 0.1  # of the computer's or the container's memory
MOST_RESERVE_BYTES = 2 * GIB  # for the default reserve
LOOK_S = 1.0  # between checks of the available memory;
PLENTY = 2  # multiple of the reserve
PLENTY_S = 10.0  # a cache grows after this much time of plenty
LEAST_SHARE = 1 / 16  # of its blocks, the minimum size of a cache


def reserve_bytes(options: EngineOptions) -> int | None:
    """Return the host memory to leave to other programs; None: the caches never shrink."""
    if options.tensor_parallel > 1:
        return None  # each rank has its own caches
    if options.host_reserve_gib is None:
        return min(int(host_memory().total_bytes * RESERVE_SHARE), MOST_RESERVE_BYTES)
    return int(options.host_reserve_gib * GIB) or None


class HostReserve:
    """Shrinks host-memory caches when available memory falls below the reserve, and grows them again.

        available   |<- reserve ->|<- reserve ->|
                     too little    enough        plenty, for some seconds: a cache grows
                     a cache returns the missing part

    A smaller cache uses only its first blocks. Requests with other blocks move in the next iteration, or are
    recomputed. Once those blocks are unused, their pages return to the system; the addresses stay valid, so
    that nothing must be rebuilt. The oldest request keeps its blocks. Pinned memory, for example the
    swap-cache of a GPU, never shrinks.

    All calls come from the engine's thread, while no iteration runs.

    Args:
        num_bytes: the reserve.
        clock: in seconds.
        available: returns the available bytes of host memory; None: query the system.
    """

    def __init__(
        self,
        scheduler: Scheduler[Request],
        kv_cache: KVCache,
        storage: KVStorage,
        num_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        available: Callable[[], int] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._kv = kv_cache
        pools = {tier: storage[tier] for tier in storage.tiers if not tier.is_remote}
        self._pools: Mapping[KVTier, KVPool] = {
            tier: pool for tier, pool in pools.items() if pool.num_blocks and pool.block_bytes
        }
        self._num_bytes = num_bytes
        self._clock = clock
        self._available = available or (lambda: host_memory().available_bytes)
        self._draining: set[KVTier] = set()  # caches that shrank but have not returned their pages yet
        self._next_look_s = clock()
        self._plenty_since_s: float | None = None

    @property
    def is_due(self) -> bool:
        return bool(self._pools) and (bool(self._draining) or self._clock() >= self._next_look_s)

    @property
    def is_short(self) -> bool:
        return any(size.limit < size.most for size in self._sizes().values())

    def look(self) -> bool:
        """Shrink or grow caches if a check is due; return True if a size changed."""
        if not self.is_due:
            return False
        self._give_back()
        if self._draining or self._clock() < self._next_look_s:
            return False
        self._next_look_s = self._clock() + LOOK_S
        try:
            available = self._available()
        except OSError as error:  # no file handle left, for example: the caches keep their sizes
            logger.debug("the available memory is unknown: %s", error)
            return False
        if available < PLENTY * self._num_bytes:
            self._plenty_since_s = None
            return available < self._num_bytes and self._shrink(self._num_bytes - available)
        if self._plenty_since_s is None:
            self._plenty_since_s = self._clock()
        if self._clock() - self._plenty_since_s < PLENTY_S:
            return False
        self._plenty_since_s = self._clock()
        return self._grow(available - PLENTY * self._num_bytes)

    def make_room(self) -> bool:
        """Grow the caches for the oldest request, which fits in no tier; return False if none can grow."""
        sizes = self._sizes()
        needed = {tier: self._least_blocks(tier, size) for tier, size in sizes.items()}
        if all(needed[tier] <= size.limit for tier, size in sizes.items()):
            needed = {tier: size.most for tier, size in sizes.items()}
        return self._set_limits({tier: max(needed[tier], size.limit) for tier, size in sizes.items()})

    def _sizes(self) -> dict[KVTier, PoolSize]:
        return {tier: self._kv.size(tier) for tier in self._pools}

    def _least_blocks(self, tier: KVTier, size: PoolSize) -> int:
        least = max(self._scheduler.queues.least_blocks(tier), int(size.most * LEAST_SHARE))
        return min(-(-least // BLOCKS_PER_RUN) * BLOCKS_PER_RUN, size.most)

    def _set_limits(self, limits: Mapping[KVTier, int]) -> bool:
        """Apply the limits that differ; return True if any did."""
        changed = {tier: limit for tier, limit in limits.items() if limit != self._kv.size(tier).limit}
        for tier, limit in changed.items():
            self._scheduler.set_limit(tier, limit)
        return bool(changed)

    def _shrink(self, missing: int) -> bool:
        """Shrink every cache by the same share of the memory that it occupies."""
        sizes = self._sizes()
        held_bytes = sum(size.touched * self._pools[tier].block_bytes for tier, size in sizes.items())
        share = 1 - min(missing / held_bytes, 1.0) if held_bytes else 1.0
        kept = {
            tier: max(full_runs(size.touched * share), self._least_blocks(tier, size))
            for tier, size in sizes.items()
        }
        limits = {
            tier: min(kept[tier], size.limit) for tier, size in sizes.items() if kept[tier] < size.touched
        }
        has_changed = self._set_limits(limits)
        self._draining |= limits.keys()
        self._give_back()
        return has_changed

    def _give_back(self) -> None:
        for tier in tuple(self._draining):
            if not self._scheduler.queues.is_drained(tier):
                continue
            self._draining.discard(tier)
            size = self._kv.size(tier)
            try:
                num_bytes = self._pools[tier].give_back(size.limit)
            except OSError as error:
                self._stop(error)
                return
            self._kv.forget_touched(tier)
            logger.info(
                "other programs need memory: the %s gave back up to %.2f GB and now has %d of %d tokens",
                tier.title,
                num_bytes / 1e9,
                size.limit * self._kv.block_size,
                size.most * self._kv.block_size,
            )

    def _grow(self, spare: int) -> bool:
        """Grow every cache by the same share of its missing blocks."""
        sizes = self._sizes()
        missing = sum(
            (size.most - size.limit) * self._pools[tier].block_bytes for tier, size in sizes.items()
        )
        if not missing:
            return False
        share = min(spare / missing, 1.0)
        limits = {}
        for tier, size in sizes.items():
            grown = max(full_runs(size.limit + (size.most - size.limit) * share), size.limit)
            limit = limits[tier] = size.most if share == 1.0 else grown
            if limit > size.limit:
                tokens, most = (n * self._kv.block_size for n in (limit, size.most))
                logger.info("memory is plentiful: the %s has %d of %d tokens again", tier.title, tokens, most)
        return self._set_limits(limits)

    def _stop(self, error: OSError) -> None:
        """Restore full sizes for good, because the system does not take memory back."""
        logger.warning("memory cannot be given back to other programs, so the caches keep it: %s", error)
        self._set_limits({tier: size.most for tier, size in self._sizes().items()})
        self._pools = {}
        self._draining.clear()
