"""Which workers were lost in an iteration: all ranks have to know, and throw away what has come out."""

from collections.abc import Callable

import torch
from torch import Tensor

from neo_desktop.engine.batch import IterationPlan
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.placement import Place
from neo_desktop.engine.remote.link import WorkerLostError
from neo_desktop.engine.remote.pool import RemotePool
from neo_desktop.engine.remote.rank_link import RankLink


class Losses:
    """A rank's part in that.

    Args:
        storage: of the rank.
        add_up: puts the sum over all ranks into a tensor in host memory.
    """

    def __init__(self, storage: KVStorage, add_up: Callable[[Tensor], None]) -> None:
        self._add_up = add_up
        self._links: dict[Place, RankLink] = {}
        for place in storage.places:
            pool = storage[place]
            if isinstance(pool, RemotePool) and isinstance(pool.link, RankLink):
                self._links[place] = pool.link

    def check(self, plan: IterationPlan) -> None:
        """Compare with the other ranks, after all sums of an iteration that had to do with workers.

        Raises:
            WorkerLostError: a rank has lost a worker; all ranks raise it.
            BrokenGroupError: a rank is gone.
        """
        places = {sequence.place for sequence in plan.all_sequences}
        places.update(place for each in plan.copies for place in (each.source, each.target))
        links = [link for place, link in self._links.items() if place in places]
        if not links:
            return
        counts = torch.tensor([float(link.lost is not None) for link in links])
        self._add_up(counts)
        for link, count in zip(links, counts.tolist(), strict=True):
            if count:
                elsewhere = "another part of the model has lost its connection to it"
                raise link.lost or WorkerLostError(link.name, elsewhere)
