"""The buffers of a sub-batch that stages read and write, allocated once."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.expert_operators import ExpertScratch
from neo_desktop.models.recurrent import RecurrentBatch
from neo_desktop.native import Buffer

GIVEN = RESIDUAL, X, QKV, ATTENTION, COS, SIN, NORMED = range(7)
"""The buffers of a native row program that are a state's, in the order of `State.seen_by_native`."""


def given_buffers(config: ModelConfig, dtype: torch.dtype) -> list[Buffer]:
    """Return the buffers in the order of `GIVEN`; `dtype`: of the model."""
    widths = config.carried_width, config.hidden_size, config.qkv_rows, config.num_heads * config.head_dim
    angles = Buffer(config.rotation_width, torch.float32, is_given=True)
    rows = [Buffer(width, dtype, is_given=True) for width in widths]
    return [*rows, angles, angles, Buffer(config.hidden_size, dtype, is_given=True)]


@dataclass(frozen=True, slots=True)
class Scratch:
    """Scratch memory within a stage; states of a device share it, because stages run one after the other."""

    normed: Tensor  # [rows, hidden]
    gate_up: Tensor  # [rows, 2 * intermediate]
    gated: Tensor  # [rows, intermediate]
    experts: ExpertScratch | None = None  # None: a dense model

    @classmethod
    def empty(cls, config: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device) -> "Scratch":
        is_dense = any(name.endswith(".gate_up") for name, _ in config.each_matrix())
        intermediate = config.intermediate_size if is_dense else 0

        def room(width: int) -> Tensor:
            return torch.empty(rows, width, dtype=dtype, device=device)

        hidden, experts = config.hidden_size, None
        if config.experts is not None:
            experts = ExpertScratch.empty(rows, config.experts, hidden, dtype, device)
        return cls(room(hidden), room(2 * intermediate), room(intermediate), experts)

    def first(self, rows: int) -> "Scratch":
        experts = None if self.experts is None else self.experts.first(rows)
        return Scratch(self.normed[:rows], self.gate_up[:rows], self.gated[:rows], experts)


@dataclass(slots=True)
class State:
    """The tensors that the stages of one sub-batch pass on, in the model's dtype unless noted.

    Between stages, `residual + x` are the hidden states: the next normalisation adds the two.
    """

    residual: Tensor  # [rows, hidden]
    x: Tensor  # [rows, hidden]
    qkv: Tensor  # [rows, (heads + kv_parts * kv_heads) * head_dim]
    attention: Tensor  # [rows, heads, head_dim]: output of the attention
    cos: Tensor  # [rows, 1, head_dim] float32; see `operators.rotation`
    sin: Tensor
    scratch: Scratch
    recurrent: RecurrentBatch | None = None  # None: a model without recurrent layers, or fresh states
    _seen: list[native.View] | None = field(default=None, compare=False)  # see `seen_by_native`

    @classmethod
    def empty(
        cls, config: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device, scratch: Scratch
    ) -> "State":
        """Allocate uninitialised memory for `rows` tokens; `scratch`: of at least as many."""

        def room(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.empty(rows, *shape, dtype=of, device=device)

        return cls(
            residual=room(config.carried_width),
            x=room(config.hidden_size),
            qkv=room(config.qkv_rows),
            attention=room(config.num_heads, config.head_dim),
            cos=room(1, config.rotation_width, of=torch.float32),
            sin=room(1, config.rotation_width, of=torch.float32),
            scratch=scratch.first(rows),
        )

    @property
    def rows(self) -> int:
        return len(self.residual)

    def seen_by_native(self) -> list[native.View]:
        """Return the buffers of native row programs, in the order of `GIVEN`, each [rows, width]."""
        if self._seen is None:
            row_buffers = self.attention.flatten(1), self.cos[:, 0], self.sin[:, 0]
            tensors = (self.residual, self.x, self.qkv, *row_buffers, self.scratch.normed)
            self._seen = [native.view_of("rows", tensor) for tensor in tensors]
        return self._seen

    def first(self, rows: int) -> "State":
        x, qkv, attention, scratch = self.x[:rows], self.qkv[:rows], self.attention[:rows], self.scratch
        angles = self.cos[:rows], self.sin[:rows]
        return State(self.residual[:rows], x, qkv, attention, *angles, scratch.first(rows))

    def select(self, rows: Tensor, into: "State", first_row: int) -> None:
        """Copy some rows of the tensors that later stages read.

        Args:
            rows: [m] int64
            into: destination; must not share memory with this state.
            first_row: of the destination.
        """
        target = slice(first_row, first_row + len(rows))
        torch.index_select(self.residual, 0, rows, out=into.residual[target])
        torch.index_select(self.attention, 0, rows, out=into.attention[target])
