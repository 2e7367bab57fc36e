"""The interface of a memory below the KV caches."""

from collections.abc import Sequence
from typing import NamedTuple

from neo_desktop.engine.kv.block_pool import BlockHash
from neo_desktop.engine.kv_tier import KVTier


class BelowCounters(NamedTuple):
    """Counters since the start."""

    read_bytes: int = 0
    written_bytes: int = 0
    dropped_bytes: int = 0  # deleted, or evicted from the caches before they were written
    num_hit_tokens: int = 0  # tokens whose KV came back


NOTHING = BelowCounters()


class Below:
    """A memory for blocks that leave the caches; this one keeps nothing.

    The engine's thread makes all calls.
    """

    @property
    def counters(self) -> BelowCounters:
        """Counters since the start."""
        return NOTHING

    def keep(self, tier: KVTier, hashes: Sequence[BlockHash]) -> None:
        """Note the full blocks of a request that leaves a tier, in the order of its tokens."""

    def brings(self, num_tokens: int, hashes: Sequence[BlockHash], tier: KVTier) -> bool:
        """Return True if blocks of a waiting request are on their way to the tier; start that if it pays.

        Args:
            num_tokens: Length of the request.
            hashes: The known hashes of its leading full blocks.
        """
        return False

    def look(self, num_under_way: int) -> bool:
        """Publish blocks that have arrived, and start further work; return True if work has ended.

        Args:
            num_under_way: Number of iterations that are running.
        """
        return False

    def wait(self) -> bool:
        """Wait a moment for blocks; return False if there is nothing to wait for. No iteration is running."""
        return False

    def close(self) -> None:
        """Keep the rest, and end all threads."""
