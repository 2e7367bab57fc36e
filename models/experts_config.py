"""The sizes of a mixture of experts."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from neo_desktop.models.json_file import ModelError

MAX_EXPERTS = 2**10
EXPERT_UNIT = 64  # rows of experts' matrices are multiples of it: each begins at a whole tile, in any form


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """`(up + 1) * gate * sigmoid(alpha * gate)`, of gates of at most `limit` and ups within it."""

    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Feed-forward networks of layers that have several, of which each token takes some."""

    count: int
    per_token: int
    intermediate_size: int  # of one of them
    layers: tuple[int, ...]  # that have them; the others have a network for all tokens
    # Whether the weights of those that a token takes sum to 1; else they are their share of all experts'.
    normalises: bool = True
    router_bias: bool = False
    bias: bool = False
    clamped: ClampedGate | None = None  # None: silu(gate) * up


def check_experts(
    path: Path, experts: ExpertsConfig, hidden_size: int, unsupported: type[ModelError] = ModelError
) -> None:
    """Raise ModelError for experts that cannot be, and another one for those that cannot be computed here."""
    if experts.per_token > experts.count:
        raise ModelError(
            f"{path} has {experts.count} experts, of which no token can take {experts.per_token}: "
            "correct the file."
        )
    for size, what in ((hidden_size, "hidden states"), (experts.intermediate_size, "experts")):
        if size % EXPERT_UNIT:
            raise unsupported(
                f"{path} has {what} of {size} numbers; with a mixture of experts only multiples of "
                f"{EXPERT_UNIT} are supported."
            )


class ExpertNames(NamedTuple):
    """What a family calls a layer's mixture of experts."""

    block: str
    router: str
    gate: str
    up: str
    down: str

    def of_each(self, kind: str, experts: Iterable[int]) -> list[str]:
        """Return the modules of one matrix of some experts: `gate`, `up` or `down`."""
        return [f"{self.block}.experts.{expert}.{getattr(self, kind)}" for expert in experts]


def expert_names(architecture: str) -> ExpertNames:
    """Return what checkpoints of Hugging Face call them, or would if gpt-oss's had a tensor for each."""
    if architecture == "MixtralForCausalLM":
        return ExpertNames("block_sparse_moe", "gate", "w1", "w3", "w2")
    router = "router" if architecture == "GptOssForCausalLM" else "gate"
    return ExpertNames("mlp", router, "gate_proj", "up_proj", "down_proj")
