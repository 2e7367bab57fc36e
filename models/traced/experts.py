"""Mixtures of experts in models of `transformers`: their matrices and matmuls."""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from neo_desktop.models.decoder import Decoder
from neo_desktop.models.expert_operators import ExpertScratch, gated
from neo_desktop.models.experts_config import EXPERT_UNIT, MAX_EXPERTS
from neo_desktop.models.matrices import Matrix
from neo_desktop.models.moe import MoE
from neo_desktop.models.operators import Operators
from neo_desktop.models.stored_tensor import StoredTensor
from neo_desktop.models.traced.capture import CannotCutError, first_matrix
from neo_desktop.models.traced.sizes import Mixed


def mixed(module: Any, per_token: int, names: Mapping[int, str], index: int) -> Mixed:
    """Return the sizes of a layer's experts, from the names of parameters by id.

    Raise CannotCutError if the experts are not supported.
    """
    kinds = ("gate", "up", "down") if module.has_gate else ("up", "down")
    gate_up, down = first_matrix(module), module.down_proj
    count, hidden, intermediate = down.shape
    if gate_up.shape != (count, (len(kinds) - 1) * intermediate, hidden) or not 0 < count <= MAX_EXPERTS:
        raise CannotCutError("its experts have matrices of unusual shapes")
    if hidden % EXPERT_UNIT or intermediate % EXPERT_UNIT:
        raise CannotCutError(f"its experts' sizes are not multiples of {EXPERT_UNIT}")
    gating = _gating(module._apply_gate) if module.has_gate else _squared(module.act_fn)
    parameters = names[id(gate_up)], names[id(down)]

    def matrix(kind: str) -> Matrix:
        parameter, rows, columns = parameters[0], intermediate, hidden
        if kind == "down":
            parameter, rows, columns = parameters[1], hidden, intermediate
        weights = tuple(f"{parameter}[{expert}].{kind}" for expert in range(count))
        name, each = f"{index}.experts_{kind}", (rows,) * count
        return Matrix(name, weights, each, columns, experts=count, per_token=per_token)

    return Mixed(*parameters, tuple(map(matrix, kinds)), gating)


def _squared(function: Callable[[Tensor], Tensor]) -> Literal["relu"]:
    """Return the name of a function without gate. Raise CannotCutError if it is not a squared ReLU."""
    numbers = torch.linspace(-9, 9, 65, device="cpu")
    if not torch.allclose(function(numbers), gated(numbers, numbers, "relu"), rtol=1e-4, atol=1e-5):
        raise CannotCutError("its experts have no gates, and another function than a squared ReLU")
    return "relu"


def _gating(apply_gate: Callable[[Tensor], Tensor]) -> Literal["silu", "gelu"]:
    """Return the gate's function, compared for small and large inputs, so that clamps show.

    Raise CannotCutError if it is another one.
    """
    sizes = torch.logspace(-3, 4, 65, device="cpu")
    numbers = torch.cat((-sizes, torch.zeros(1, device="cpu"), sizes))
    gate, up = torch.meshgrid(numbers, numbers, indexing="ij")
    result = apply_gate(torch.cat((gate, up), dim=-1))
    of_gates: tuple[Literal["silu", "gelu"], ...] = ("silu", "gelu")
    for name in of_gates if result.shape == gate.shape else ():
        if torch.allclose(result, gated(gate, up, name), rtol=1e-4, atol=1e-5):
            return name
    raise CannotCutError("its experts' gates are neither SiLU nor GELU by tanh")


def parts_of_stacks(moe_layers: Sequence[Mixed], tensors: dict[str, StoredTensor]) -> None:
    """Cut tensors that hold all experts of a layer into one per expert."""
    for of_layer, name in ((moe, name) for moe in moe_layers for name in (moe.gate_up, moe.down)):
        matrices, stack = of_layer.of(name), tensors.get(name)
        count = matrices[0].experts
        if stack is None or len(stack.shape) != 3 or stack.shape[0] != count or stack.is_quantised:
            continue
        del tensors[name]
        rows = stack.shape[1] // len(matrices)
        shape = (rows, stack.shape[2])
        for index, fused in enumerate(matrices):
            of_kind = slice(index * rows, (index + 1) * rows)
            for expert, own in enumerate(fused.weights):
                tensors[own] = stack.part(own, shape, itemgetter((expert, of_kind)))


class ExpertsProduct(nn.Module):
    """Routed experts; see `capture.experts`."""

    def __init__(self, of_layer: Mixed, decoder: Decoder, operators: Operators) -> None:
        super().__init__()
        *gate_up, down = (decoder.matrices[fused.name] for fused in of_layer.matrices)
        matrices, slots = (gate_up[0], gate_up[-1], down), decoder.slots_of(gate_up[0])
        self.moe = MoE(matrices, of_layer.config, operators, slots=slots)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, room: ExpertScratch | None) -> Tensor:
        """Return the results; `room` receives the choice, None: it is allocated."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        x = x.contiguous()
        room = room or self.moe.scratch(x)
        room.choice.ids.copy_(ids)
        room.choice.weights.copy_(weights)
        self.moe.multiply(x, room, out)
        return out
