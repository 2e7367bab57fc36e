"""Experts that move at random, as many as possible."""

import random
from collections.abc import Callable

from neo_desktop.engine.predict.expert_places import ExpertPlaces, Move
from neo_desktop.models.linear.offloaded import MoveBudget

NO_LIMIT = MoveBudget(1e12, 1e12)


def churning(seed: int) -> tuple[Callable[..., ExpertPlaces], list[Move]]:
    """Return a kind of `ExpertPlaces` that wants other experts each time, and the list of its moves."""
    rng, moved = random.Random(seed), list[Move]()

    class Churning(ExpertPlaces):
        def moves(self) -> list[Move]:
            self.moves_experts = True
            for row in self._uses:
                rng.shuffle(row)
            moved.extend(moves := super().moves())
            return moves

    return Churning, moved
