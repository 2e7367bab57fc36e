"""Dense rows, multiplied by torch."""

import torch
from torch import Tensor


class Plain:
    """A `protocol.Linear` with a dense weight."""

    form = "plain"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def memory(self) -> dict[torch.device, int]:
        return {self.weight.device: self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)}

    def load(self, row: int, weight: Tensor) -> None:
        self.weight[row : row + len(weight)].copy_(weight)

    def dense(self) -> Tensor:
        return self.weight

    def multiply(self, x: Tensor, out: Tensor) -> Tensor:
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)
