"""Experts that move, on a virtual clock: which experts a chat's tokens choose, and how long a token takes.

The engine's own `ExpertPlaces` decides every move.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from neo_desktop.engine.predict.expert_places import STORED_PASSES, ExpertPlaces, move_budget
from neo_desktop.engine.predict.offloaded_matmul import Rates, Sizes

TOKENS = 1500  # simulated tokens of a chat, of which the first third is not counted
# Of 512 experts, a list of the 64 or 128 most recently used ones holds these shares of the choices, published
# for 10 experts per token: https://github.com/ggml-org/llama.cpp/pull/27861
PUBLISHED = ((64 / 512, 0.67), (128 / 512, 0.81))


class Routing(Protocol):
    """A kind of router."""

    def choices(self, layers: int, count: int, per_token: int, seed: int) -> Iterator[NDArray[np.bool_]]:
        """Yield the experts that the next token chooses, [layers, count]."""
        ...


@dataclass(frozen=True, slots=True)
class Skewed:
    """A layer's n-th expert is used in proportion to 1 / n^skew, in a random order; 0: all alike."""

    skew: float = 0.0

    def choices(self, layers: int, count: int, per_token: int, seed: int) -> Iterator[NDArray[np.bool_]]:
        rng = np.random.default_rng(seed)
        order = rng.permuted(np.tile(np.arange(count), (layers, 1)), axis=1)
        uses = -self.skew * np.log(np.arange(1, count + 1))
        while True:
            yield _chosen(np.take_along_axis(order, _drawn(rng, uses, layers, per_token), 1), count)


@dataclass(frozen=True, slots=True)
class Recent:
    """Recently used experts are chosen again, as published for one model; none is preferred for ever."""

    def choices(self, layers: int, count: int, per_token: int, seed: int) -> Iterator[NDArray[np.bool_]]:
        rng = np.random.default_rng(seed)
        order = rng.permuted(np.tile(np.arange(count), (layers, 1)), axis=1)  # most recently used first
        shares, held = zip((0.0, 0.0), *PUBLISHED, (1.0, 1.0), strict=True)
        uses = np.log(np.diff(np.interp(np.arange(count + 1) / count, shares, held)))
        while True:
            depths = _drawn(rng, uses, layers, per_token)
            experts = np.take_along_axis(order, depths, 1)
            yield _chosen(experts, count)
            keys = np.tile(np.arange(count), (layers, 1))
            np.put_along_axis(keys, depths, -1, 1)
            order = np.take_along_axis(order, np.argsort(keys, axis=1, kind="stable"), 1)


def _drawn(
    rng: np.random.Generator, log_weights: NDArray[np.float64], layers: int, per_token: int
) -> NDArray[np.intp]:
    """Draw different indices per layer, by weight."""
    keys = log_weights + rng.gumbel(size=(layers, len(log_weights)))
    return np.argpartition(-keys, per_token - 1, axis=1)[:, :per_token]


def _chosen(experts: NDArray[np.intp], count: int) -> NDArray[np.bool_]:
    chosen = np.zeros((len(experts), count), np.bool_)
    np.put_along_axis(chosen, experts, True, 1)
    return chosen


class ExpertRun(NamedTuple):
    """Means per token of a chat, with experts that stay and with experts that move."""

    static_ms: float
    moving_ms: float
    static_hits: float  # share of the chosen experts that are on the GPU
    moving_hits: float
    moved_bytes: float


def run_experts(
    rates: Rates,
    experts: Sequence[tuple[Sizes, int]],
    routing: Routing,
    *,
    tokens: int = TOKENS,
    seed: int = 0,
) -> ExpertRun:
    """Simulate the experts of a chat's tokens.

    Args:
        experts: see `move_budget`.
    """
    count, layers = experts[0][0].rows, len(experts)
    per_token = round(experts[0][0].used_share * count)
    resident = np.array([[number] for _, number in experts], np.int32)
    expert_bytes = [sizes.host_bytes // count for sizes, _ in experts]
    numbers = np.tile(np.arange(count, dtype=np.int32), (layers, 1))
    first = np.where(numbers < resident, numbers, -1)
    places = ExpertPlaces(first, resident[:, 0].tolist(), expert_bytes, move_budget(rates, experts))
    found = []
    for token, chosen in enumerate(islice(routing.choices(layers, count, per_token, seed), tokens)):
        moves = places.moves()
        moved = sum(expert_bytes[move.layer] for move in moves)
        hits = (chosen & (first >= 0)).sum(1), (chosen & (places.slots >= 0)).sum(1)
        ms = [_token_ms(rates, experts, per_token, *each) for each in zip(hits, (0, moved), strict=True)]
        if 3 * token >= tokens:
            found.append((*ms, *(each.sum() / per_token / layers for each in hits), moved))
        places.finish(moves, arrived=True)
        places.record(chosen)
    return ExpertRun(*np.mean(found, axis=0).tolist())


def _token_ms(
    rates: Rates, experts: Sequence[tuple[Sizes, int]], per_token: int, hits: NDArray[np.int64], moved: float
) -> float:
    """Return the time of a token's experts in all layers, beside copies of `moved` bytes.

    Args:
        hits: experts on the GPU that the token chose, per layer.
    """
    seconds = in_memory = 0.0
    for (sizes, _), hit in zip(experts, hits.tolist(), strict=True):
        read = (per_token - hit) * sizes.host_bytes / sizes.rows
        handed = rates.offload_ms / 1e3 + sizes.handed_bytes(1, 1.0) / rates.bus_bytes_per_s
        on_gpu = hit * sizes.device_bytes / sizes.rows / rates.gpu_bytes_per_s
        seconds += max(handed + read / rates.cpu_bytes_per_s, on_gpu)
        in_memory += read
    seconds += STORED_PASSES * moved / rates.gpu_bytes_per_s
    return 1e3 * max(seconds, (in_memory + moved) / rates.host_bytes_per_s, moved / rates.bus_bytes_per_s)
