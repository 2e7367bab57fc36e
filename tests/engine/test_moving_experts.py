"""A chat's experts on a virtual clock: routers as published, and the gain of experts that move."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from seeds import seeds

from neo_desktop.engine.predict.offloaded_matmul import Rates, Sizes
from research.moving_experts import Recent, Skewed, run_experts

# A desktop with a card on its bus.
RATES = Rates(30e9, 8e11, 20e9, 300e9, 3e13, offload_ms=0.03, host_bytes_per_s=45e9)
EXPERT = 10**6  # bytes


def layers(slots: int, count: int, per_token: int, number: int = 12) -> list[tuple[Sizes, int]]:
    nbytes = count * EXPERT
    return [
        (Sizes(count, EXPERT, nbytes, nbytes, 0, unit=1, used_share=per_token / count, handed=1), slots)
    ] * number


@pytest.mark.parametrize(("size", "share"), [(64, 0.67), (128, 0.81)])
def test_recent_experts_are_chosen_as_published(size: int, share: float) -> None:
    """A plain list of recently used experts holds this share of the choices."""
    lists = [list(range(512)) for _ in range(4)]
    held = num_choices = 0
    for token, chosen in enumerate(islice(Recent().choices(4, 512, 10, seed=1), 500)):
        for recent, row in zip(lists, chosen, strict=True):
            experts = np.flatnonzero(row).tolist()
            assert len(experts) == 10
            if token >= 250:
                held += len(set(experts) & set(recent[:size]))
                num_choices += 10
            recent[:] = experts + [each for each in recent if each not in experts]
    assert held / num_choices == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize(("slots", "count", "per_token"), [(64, 512, 10), (32, 128, 8), (9, 32, 4)])
def test_experts_that_move_serve_a_chat_faster(slots: int, count: int, per_token: int) -> None:
    for routing in (Recent(), Skewed(1.0)):
        run = run_experts(RATES, layers(slots, count, per_token), routing, tokens=600)
        assert run.static_hits == pytest.approx(slots / count, abs=0.1)
        assert run.moving_hits > 1.2 * run.static_hits
        assert run.moving_ms < 0.95 * run.static_ms
        assert run.moved_bytes > 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", seeds(1, 3))
@pytest.mark.parametrize(
    ("slots", "count", "per_token"), [(64, 512, 10), (22, 32, 4), (100, 128, 8), (1, 32, 4)]
)
def test_experts_that_move_are_never_slower(slots: int, count: int, per_token: int, seed: int) -> None:
    """Without locality nothing is gained, and at most 2 % is lost, even if host memory is fully used."""
    for routing, host_rate in ((Skewed(), 30e9), (Skewed(), 45e9), (Skewed(0.3), 30e9)):
        rates = replace(RATES, host_bytes_per_s=host_rate)
        run = run_experts(rates, layers(slots, count, per_token), routing, tokens=600, seed=seed)
        assert run.moving_ms < run.static_ms / 0.98
