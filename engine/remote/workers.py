"""All workers of an engine: which are there, which are lost, and which come back."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.remote.cluster import Cluster
from neo_desktop.engine.remote.greeting import RefusedError
from neo_desktop.engine.remote.heads import HeadGroup, check_heads
from neo_desktop.engine.remote.link import Address, Trust, WorkerLink, WorkerLostError
from neo_desktop.engine.remote.pool import AnyLink, RemotePool
from neo_desktop.engine.remote.shape import AttentionShape
from neo_desktop.models.config import ModelConfig

logger = logging.getLogger(__name__)

GLANCE_S = 0.05  # for which the engine's thread waits at once
RETRIES_S = (0.5, 1.0, 2.0, 5.0)  # between two tries to reach a lost worker; the last one again and again


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What people are told of a worker."""

    address: str
    lost: str | None  # why it is lost, without its name and address; None: it attends
    num_losses: int


class Workers:
    """The workers of an engine. `connect` comes first; the engine's thread makes all calls but `close`.

    Args:
        addresses: what tells where each listens.
        trust: what they are known by.
        config: of the model.
        shape: of its attention.
        sinks: [layers, heads] fp32; None: there are none.
        most_blocks: in a worker's memory; more are of no use.
        retries_s: see `RETRIES_S`.
        cluster: that the workers belong to; closed with them.
        by_heads: whether all of them are one tier, and each has some of the heads of all requests; else
            each is a place of its own.

    Raises:
        ValueError: the heads cannot be divided among so many.
    """

    def __init__(
        self,
        addresses: Sequence[Callable[[], Address]],
        trust: Trust,
        config: ModelConfig,
        shape: AttentionShape,
        sinks: Tensor | None,
        most_blocks: int,
        retries_s: Sequence[float] = RETRIES_S,
        cluster: Cluster | None = None,
        *,
        by_heads: bool = False,
    ) -> None:
        self._config, self._shape, self._sinks, self._most_blocks = config, shape, sinks, most_blocks
        self._retries_s = retries_s
        self._cluster = cluster
        self._links = self._grouped(addresses, trust) if by_heads else self._apart(addresses, trust)
        self._reasons: dict[KVTier, str] = {}  # why those are lost that are
        self._losses = dict.fromkeys(self._links, 0)
        self._returned: list[KVTier] = []  # whom nobody has taken back yet
        self._last_loss_s = 0.0
        self._changes = threading.Lock()
        self._news = threading.Event()  # that somebody has returned since the last loss
        self._closing = threading.Event()

    def _apart(self, addresses: Sequence[Callable[[], Address]], trust: Trust) -> dict[KVTier, AnyLink]:
        tiers = [KVTier.worker(number) for number in range(1, len(addresses) + 1)]
        links = self._links_to(addresses, trust, [tier.name for tier in tiers])
        return dict(zip(tiers, links, strict=True))

    def _grouped(self, addresses: Sequence[Callable[[], Address]], trust: Trust) -> dict[KVTier, AnyLink]:
        check_heads(self._shape.num_kv_heads, len(addresses))
        tier = KVTier.worker(1)
        links = self._links_to(addresses, trust, [tier.name] * len(addresses))
        return {tier: HeadGroup(tier.name, links)}

    def _links_to(
        self, addresses: Sequence[Callable[[], Address]], trust: Trust, names: Sequence[str]
    ) -> list[WorkerLink]:
        return [WorkerLink(name, find, trust) for name, find in zip(names, addresses, strict=True)]

    def connect(self) -> None:
        """Reach all; who does not answer is tried again in the background.

        Raises:
            ConnectionError: one answers, and refuses.
        """
        for tier, link in self._links.items():
            try:
                self._open(link)
            except RefusedError as error:
                self.close()
                raise RefusedError(f"{tier} at {link.address}: {error}") from None
            except OSError as error:
                where = "" if link.address is None else f" at {link.address}"
                logger.warning("%s%s cannot be reached, and is tried again: %s", tier, where, error)
                self._await(tier, str(error))

    def _open(self, link: AnyLink) -> None:
        link.open(self._shape, self._sinks, self._most_blocks)

    @property
    def pools(self) -> dict[KVTier, RemotePool]:
        """`tier -> its memory`, of all of them."""
        shape = self._shape
        return {
            tier: RemotePool(tier, self._config, shape.block_size, shape.dtype, link)
            for tier, link in self._links.items()
        }

    @property
    def num_blocks(self) -> dict[KVTier, int]:
        """`tier -> blocks`; none of those that are lost."""
        with self._changes:
            return {
                tier: 0 if tier in self._reasons else link.num_blocks for tier, link in self._links.items()
            }

    @property
    def states(self) -> Mapping[KVTier, WorkerState]:
        """What people are told."""
        with self._changes:
            return {
                tier: WorkerState(
                    str(link.address or "no address yet"), self._reasons.get(tier), self._losses[tier]
                )
                for tier, link in self._links.items()
            }

    def lose(self, error: WorkerLostError) -> KVTier:
        """Take in that a worker is lost, and try to reach it again; return its tier."""
        (tier,) = (tier for tier in self._links if tier.name == error.worker)
        link = self._links[tier]
        # Several workers may be one tier: the reason says which of them.
        which = "" if error.address in ("", str(link.address)) else f" ({error.address})"
        reason = error.reason + which
        link.close()
        logger.warning("%s is lost: %s; its requests are computed again", error.worker, reason)
        with self._changes:
            self._losses[tier] += 1
        self._await(tier, reason)
        return tier

    def take_returned(self) -> dict[KVTier, int]:
        """Return `tier -> blocks` of those that have come back since the last call, empty."""
        if not self._returned:  # nearly always
            return {}
        with self._changes:
            returned, self._returned = self._returned, []
            for tier in returned:
                del self._reasons[tier]
            return {tier: self._links[tier].num_blocks for tier in returned}

    def wait_for_return(self, longest_s: float) -> bool:
        """Wait a moment for a lost worker; return whether it is worth going on to wait.

        Args:
            longest_s: after the last loss; then it is not.
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
        while not self._closing.wait(self._retries_s[min(count, len(self._retries_s) - 1)]):
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
        """End all connections; may be called again, from any thread."""
        self._closing.set()
        for link in self._links.values():
            link.close()
        if self._cluster is not None:
            self._cluster.close()
