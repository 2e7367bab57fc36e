"""The configuration of a mixture of experts."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from neo_desktop.models.json_file import ModelError

MAX_EXPERTS = 2**10
EXPERT_UNIT = 64  # rows per expert are multiples of this: each expert starts at a tile in any format


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """`(up + 1) * gate * sigmoid(alpha * gate)`; gates are clamped from above to `limit`, ups to ±`limit`."""

    alpha: float = 1.702
    limit: float = 7.0


Gating = ClampedGate | Literal["silu", "gelu", "relu"]
"""silu(gate) * up, or with GELU, approximated by tanh, or a clamped gate.

relu(gate) * up, if gate and up are one matrix: the square of a ReLU.
"""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Sizes of the mixture of experts."""

    count: int
    per_token: int
    intermediate_size: int  # of one expert
    layers: tuple[int, ...]  # layers with experts; the others have a dense MLP
    # A token's routing weights sum to 1; else they are probabilities among all experts.
    normalises: bool = True
    router_bias: bool = False
    bias: bool = False
    gating: Gating = "silu"


def check_experts(
    path: Path, experts: ExpertsConfig, hidden_size: int, unsupported: type[ModelError] = ModelError
) -> None:
    """Raise ModelError for impossible sizes, `unsupported` for sizes without a kernel."""
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
    """Names of the modules of a layer's mixture of experts."""

    block: str
    router: str
    gate: str
    up: str
    down: str

    def of_each(self, kind: str, experts: Iterable[int]) -> list[str]:
        """Return the module names of one matrix (`gate`, `up` or `down`) of some experts."""
        return [f"{self.block}.experts.{expert}.{getattr(self, kind)}" for expert in experts]


def expert_names(architecture: str) -> ExpertNames:
    """Return the module names in Hugging Face checkpoints.

    gpt-oss stores all experts in one tensor; its names are those of a checkpoint with a tensor per expert.
    """
    if architecture == "MixtralForCausalLM":
        return ExpertNames("block_sparse_moe", "gate", "w1", "w3", "w2")
    router = "router" if architecture == "GptOssForCausalLM" else "gate"
    return ExpertNames("mlp", router, "gate_proj", "up_proj", "down_proj")
