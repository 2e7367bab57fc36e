"""Attention workers of a simulated machine: how many it wants, and what they cost."""

from dataclasses import dataclass

from neo_desktop.engine.schedule.policies import POLICIES
from neo_desktop.engine.simulation.workers import Workers


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers of one simulation."""

    workers: Workers
    wanted: int | None  # by the GPU; None: no number is enough
    gpu_price: float | None  # of an hour of the GPU's machine
    worker_price: float | None  # likewise of each worker

    def price(self, policy: str) -> float | None:
        """Return what an hour costs: the workers only where the policy uses them; None: nobody said."""
        if self.gpu_price is None or self.worker_price is None:
            return None
        uses = any(place.host_attends for place in POLICIES[policy].places)
        return self.gpu_price + self.worker_price * self.workers.count * uses

    @property
    def advice(self) -> str:
        """How many workers of this kind are worth having."""
        if self.wanted is None:
            return (
                "No number of such workers keeps up with this GPU: for half of these requests, the way there "
                "and back takes longer than the GPU's work for the other half. A faster link would help."
            )
        named = "1 worker" if self.wanted == 1 else f"{self.wanted:,} workers"
        return (
            f"This GPU wants {named} of this kind: so many hide the attention for all of these requests "
            "behind its own work, and hold their KV."
        )
