"""Shares of bandwidth that llama.cpp reaches on consumer cards and hosts, fitted to published speeds.

`python -m benchmarks.world fit` computes these tables from half of the rows of benchmarks/world.json.
docs/simulation.md has the errors on the other half. Predictions for this project take the same shares where
it has measured nothing.
"""

from typing import NamedTuple


class CardShares(NamedTuple):
    """Shares of one generation of cards."""

    streaming: float  # share of memory bandwidth, for reading weights
    attention: float  # the same, for reading KV
    layer_us: float  # time per layer in addition


class HostShares(NamedTuple):
    """Shares of the bandwidth of hosts with one kind of memory."""

    weights: float
    experts: float  # weights of experts, in short pieces
    attention: float  # KV, by llama.cpp's kernel


CARDS = {
    "turing": CardShares(0.8, 0.57, 46),
    "ampere": CardShares(0.9, 0.94, 44),
    "ampere-gddr6x": CardShares(0.7, 0.52, 18),
    "ada": CardShares(0.88, 0.93, 43),
    "blackwell": CardShares(0.86, 0.44, 36),
    # The presets of data centres' cards do not use these. Few rows determine them, and programs reach more:
    # on an H100 this project's matmuls read 2.66 of 3.35 TB/s.
    "t4": CardShares(0.29, 0.6, 59),
    "a100-80gb": CardShares(0.44, 0.58, 52),
    "h100": CardShares(0.5, 0.59, 54),
}
HOSTS = {"ddr4": HostShares(0.53, 0.37, 0.13), "ddr5": HostShares(0.76, 0.56, 0.2)}
MIXTURE_US = 27  # more per layer with experts
RECURRENT_US = 8  # more per layer with a state matrix: DeltaNet, Mamba-2
HOST_LAYER_US = 63  # more per layer with work for the CPU
TOKEN_US = 280  # per token

# Name prefix of a card -> its generation; the first that matches.
_GENERATIONS = (
    ("gtx-16", "turing"),
    ("rtx-20", "turing"),
    *((card, "ampere-gddr6x") for card in ("rtx-3070-ti", "rtx-3080", "rtx-3090")),
    ("rtx-30", "ampere"),
    ("rtx-40", "ada"),
    ("rtx-50", "blackwell"),
)


def generation(card: str) -> str | None:
    """Return the generation of a card of this name; None: a card of data centres, or unknown."""
    return next((name for prefix, name in _GENERATIONS if card.startswith(prefix)), None)
