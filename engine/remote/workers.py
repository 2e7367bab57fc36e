"""All workers of an engine: connected, lost and returning ones."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.remote.link import Address, Trust, WorkerLink, WorkerLostError
from neo_desktop.engine.remote.pool import RemotePool
from neo_desktop.engine.remote.shape import AttentionShape
from neo_desktop.engine.remote.trust import RefusedError
from neo_desktop.models.config import ModelConfig

logger = logging.getLogger(__name__)

GLANCE_S = 0.05  # first wait of the engine's thread for a lost worker
RETRIES_S = (0.5, 1.0, 2.0, 5.0)  # between attempts to reach a lost worker; the last value repeats


@dataclass(frozen=True, slots=True)
class WorkerState:
    """State of a worker, for display."""

    address: str
    lost: str | None  # reason of the loss, without name and address; None: connected


class Workers:
    """The workers of an engine. Call `connect` first; only `close` may be called from other threads.

    Args:
        addresses: return each worker's current address.
        sinks: [layers, heads] fp32; None: the model has none.
        most_blocks: useful blocks per worker.
    """

    def __init__(
        self,
        addresses: Sequence[Callable[[], Address]],
        trust: Trust,
        config: ModelConfig,
        shape: AttentionShape,
        sinks: Tensor | None,
        most_blocks: int,
    ) -> None:
        self._config, self._shape, self._sinks, self._most_blocks = config, shape, sinks, most_blocks
        tiers = [KVTier.worker(number) for number in range(1, len(addresses) + 1)]
        self._links = {
            tier: WorkerLink(tier.name, find, trust) for tier, find in zip(tiers, addresses, strict=True)
        }
        self._reasons: dict[KVTier, str] = {}  # reasons of the current losses
        self._returned: list[KVTier] = []  # not taken yet by `take_returned`
        self._last_loss_s = 0.0
        self._changes = threading.Lock()
        self._news = threading.Event()  # set if a worker has returned since the last loss
        self._closing = threading.Event()

    def connect(self) -> None:
        """Connect to all workers; retry unreachable ones in the background.

        Raises:
            ConnectionError: a worker refuses.
        """
        for tier, link in self._links.items():
            try:
                self._open(link)
            except RefusedError as error:
                self.close()
                raise RefusedError(f"{tier} at {link.address}: {error}") from None
            except OSError as error:
                where = "" if link.address is None else f" at {link.address}"
                logger.warning("%s%s cannot be reached; retrying in the background: %s", tier, where, error)
                self._await(tier, str(error))

    def _open(self, link: WorkerLink) -> None:
        link.open(self._shape, self._sinks, self._most_blocks)

    @property
    def pools(self) -> dict[KVTier, RemotePool]:
        shape = self._shape
        return {
            tier: RemotePool(tier, self._config, shape.block_size, shape.dtype, link)
            for tier, link in self._links.items()
        }

    @property
    def num_blocks(self) -> dict[KVTier, int]:
        """Blocks per tier; lost workers are left out."""
        with self._changes:
            return {
                tier: 0 if tier in self._reasons else link.num_blocks for tier, link in self._links.items()
            }

    @property
    def states(self) -> Mapping[KVTier, WorkerState]:
        with self._changes:
            return {
                tier: WorkerState(str(link.address or "no address yet"), self._reasons.get(tier))
                for tier, link in self._links.items()
            }

    def lose(self, error: WorkerLostError) -> KVTier:
        """Record the loss of a worker and start to reconnect; return its tier."""
        (tier,) = (tier for tier in self._links if tier.name == error.worker)
        link = self._links[tier]
        link.close()
        logger.warning("%s is lost: %s; its requests will be recomputed", error.worker, error.reason)
        self._await(tier, error.reason)
        return tier

    def take_returned(self) -> dict[KVTier, int]:
        """Return `tier -> blocks` of the workers that returned since the last call; they are empty."""
        if not self._returned:  # the common case
            return {}
        with self._changes:
            returned, self._returned = self._returned, []
            for tier in returned:
                del self._reasons[tier]
            return {tier: self._links[tier].num_blocks for tier in returned}

    def wait_for_return(self, longest_s: float) -> bool:
        """Wait a moment for a lost worker; return False if waiting is no longer worthwhile.

        Args:
            longest_s: limit on the time since the last loss.
        """
        if not self._reasons:
            return False
        self._news.wait(GLANCE_S)
        return bool(self._returned) or time.monotonic() < self._last_loss_s + longest_s

    def _await(self, tier: KVTier, reason: str) -> None:
        with self._changes:
            self._reasons[tier] = reason
            self._last_loss_s = time.monotonic()
            self._news.clear()
        threading.Thread(target=self._reach, args=(tier,), name=f"reach {tier}", daemon=True).start()

    def _reach(self, tier: KVTier) -> None:
        link, count, since_s = self._links[tier], 0, time.monotonic()
        while not self._closing.wait(RETRIES_S[min(count, len(RETRIES_S) - 1)]):
            count += 1
            try:
                self._open(link)
            except OSError as error:
                logger.debug("%s at %s cannot be reached: %s", tier, link.address, error)
                continue
            logger.warning("%s is back after %.0f s", tier, time.monotonic() - since_s)
            with self._changes:
                self._returned.append(tier)
                self._news.set()
            break
        if self._closing.is_set():
            link.close()

    def close(self) -> None:
        """Close all connections; thread-safe, may be called again."""
        self._closing.set()
        for link in self._links.values():
            link.close()
