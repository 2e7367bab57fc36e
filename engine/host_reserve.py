"""Host memory that other programs need: caches give it back, and take it again when there is plenty."""

import logging
import time
from collections.abc import Callable, Mapping

from neo_desktop.engine.kv.cache import KVCache, PoolSize
from neo_desktop.engine.kv.layout import BLOCKS_PER_RUN
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.profiling.hardware import host_memory
from neo_desktop.engine.schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)

GIB = 1024**3
RESERVE_SHARE = 0.1  # of the computer's memory, or of the container's
MOST_RESERVE_BYTES = 2 * GIB  # unless more is asked for
LOOK_S = 1.0  # between two looks at what is available
PLENTY = 2  # times the reserve
PLENTY_S = 10.0  # for so long there must be plenty before a cache grows
LEAST_SHARE = 1 / 16  # of its blocks that a cache always keeps


def reserve_bytes(options: EngineOptions) -> int | None:
    """Return how much host memory is left to other programs; None: the caches keep what they have."""
    if options.tensor_parallel > 1:
        return None  # each rank has caches of its own
    if options.host_reserve_gib is None:
        return min(int(host_memory().total_bytes * RESERVE_SHARE), MOST_RESERVE_BYTES)
    return int(options.host_reserve_gib * GIB) or None


class HostReserve:
    """Makes the caches in host memory smaller when too little is left to others, and larger again.

        available   |<- reserve ->|<- reserve ->|
                     too little    enough        plenty, for some seconds: a cache grows
                     a cache gives back what is missing

    A smaller cache uses its first blocks only. Requests with others move in the next iteration, or are
    computed again. Once no request has a block behind them, those pages go back to the system; the
    addresses stay, so that nothing that refers to them has to be made anew. The oldest request keeps its
    blocks. Pinned memory, as the swap-cache of a GPU, stays.

    All calls come from the engine's thread, while no iteration is under way.

    Args:
        scheduler: told how many blocks it may use.
        kv_cache: the scheduler's.
        storage: the memory; pools that cannot give anything back stay as they are.
        num_bytes: the reserve.
        clock: in seconds.
        available: bytes of host memory that programs can still have; None: what the system says.
    """

    def __init__(
        self,
        scheduler: Scheduler,
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
        self._available = available or _available_bytes
        self._draining: set[KVTier] = set()  # smaller already, but their pages are not given back yet
        self._next_look_s = clock()
        self._plenty_since_s: float | None = None

    @property
    def is_due(self) -> bool:
        """Whether `look` has something to do."""
        return bool(self._pools) and (bool(self._draining) or self._clock() >= self._next_look_s)

    @property
    def is_short(self) -> bool:
        """Whether a cache is smaller than it could be."""
        return any(size.limit < size.most for size in self._sizes().values())

    def look(self) -> bool:
        """Give memory back or take it again, if it is time to; return whether a cache has another size."""
        if not self.is_due:
            return False
        self._give_back()
        if self._draining or self._clock() < self._next_look_s:
            return False
        self._next_look_s = self._clock() + LOOK_S
        try:
            available = self._available()
        except OSError as error:  # no file is left to look with, say: the caches keep what they have
            logger.debug("available memory is not known: %s", error)
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
        """Make the caches larger for the oldest request, which fits nowhere; False if they cannot be."""
        sizes = self._sizes()
        needed = {tier: self._least_blocks(tier, size) for tier, size in sizes.items()}
        if all(needed[tier] <= size.limit for tier, size in sizes.items()):
            needed = {tier: size.most for tier, size in sizes.items()}
        return self._set_limits({tier: max(needed[tier], size.limit) for tier, size in sizes.items()})

    def _sizes(self) -> dict[KVTier, PoolSize]:
        return {tier: self._kv.size(tier) for tier in self._pools}

    def _least_blocks(self, tier: KVTier, size: PoolSize) -> int:
        least = max(self._scheduler.least_blocks(tier), int(size.most * LEAST_SHARE))
        return min(-(-least // BLOCKS_PER_RUN) * BLOCKS_PER_RUN, size.most)

    def _set_limits(self, limits: Mapping[KVTier, int]) -> bool:
        """Set those that change; return whether any did."""
        changed = {tier: limit for tier, limit in limits.items() if limit != self._kv.size(tier).limit}
        for tier, limit in changed.items():
            self._scheduler.set_limit(tier, limit)
        return bool(changed)

    def _shrink(self, missing: int) -> bool:
        """Begin to give back: of the memory that each cache takes, the same share."""
        sizes = self._sizes()
        held_bytes = sum(size.touched * self._pools[tier].block_bytes for tier, size in sizes.items())
        kept_share = 1 - min(missing / held_bytes, 1.0) if held_bytes else 1.0
        limits = {}
        for tier, size in sizes.items():
            kept = int(size.touched * kept_share) // BLOCKS_PER_RUN * BLOCKS_PER_RUN
            kept = max(kept, self._least_blocks(tier, size))
            if kept < size.touched:
                limits[tier] = min(kept, size.limit)
        has_changed = self._set_limits(limits)
        self._draining |= limits.keys()
        self._give_back()
        return has_changed

    def _give_back(self) -> None:
        """Give the pages back that nobody needs any more."""
        for tier in tuple(self._draining):
            if not self._scheduler.is_drained(tier):
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
                "other programs need memory: the %s gave back up to %.2f GB and has %d of %d tokens now",
                tier.title,
                num_bytes / 1e9,
                size.limit * self._kv.block_size,
                size.most * self._kv.block_size,
            )

    def _grow(self, spare: int) -> bool:
        """Use more blocks again, of each cache the same share of what is missing."""
        sizes = self._sizes()
        missing = sum(
            (size.most - size.limit) * self._pools[tier].block_bytes for tier, size in sizes.items()
        )
        if not missing:
            return False
        share = min(spare / missing, 1.0)
        limits = {}
        for tier, size in sizes.items():
            grown = size.limit + int((size.most - size.limit) * share)
            grown = grown // BLOCKS_PER_RUN * BLOCKS_PER_RUN
            limits[tier] = size.most if share == 1.0 else max(grown, size.limit)
        has_changed = self._set_limits(limits)
        for tier, size in self._sizes().items():
            limit = size.limit
            if limit > sizes[tier].limit:
                tokens, most = (n * self._kv.block_size for n in (limit, sizes[tier].most))
                logger.info("memory is plentiful: the %s has %d of %d tokens again", tier.title, tokens, most)
        return has_changed

    def _stop(self, error: OSError) -> None:
        """Keep all memory from now on, since the system does not take it."""
        logger.warning("memory cannot be given back to other programs, so the caches keep it: %s", error)
        self._set_limits({tier: size.most for tier, size in self._sizes().items()})
        self._pools = {}
        self._draining.clear()


def _available_bytes() -> int:
    return host_memory().available_bytes
