"""A sub-batch of an iteration: its memory, and the attention for its rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from neo_desktop.engine.execute.attender import Attender
from neo_desktop.engine.execute.offloaded_matmuls import OffloadedPass
from neo_desktop.engine.execute.workspace import Memory
from neo_desktop.models.operators import Store
from neo_desktop.models.state import State


@dataclass(frozen=True)
class SubBatchPass:
    """One sub-batch on its way through the layers."""

    memory: Memory
    attenders: Sequence[Attender]  # in the device's order
    embed: Callable[[Tensor, Tensor, State], None]  # see `Stages.embed`
    store: Callable[[int], Store | None]  # layer -> target of k and v if the rotation kernel stores them
    last_rows: Sequence[int]  # rows that need a hidden state after the last layer
    products: OffloadedPass | None  # offloaded matmuls; None: the model has no offloaded matrices
    is_capturable: bool = True  # True if its linear stages depend on the iteration's sizes only

    @cached_property
    def groups(self) -> list[tuple[bool, tuple[Attender, ...]]]:
        """Neighbouring attenders that are capturable, or are not."""
        return [(can, tuple(each)) for can, each in groupby(self.attenders, lambda it: it.is_capturable)]

    def start(self) -> None:
        """Embed the tokens, as work on the device's lane."""
        memory = self.memory
        if memory.table is not None:
            torch.index_select(memory.table, 0, memory.inputs.sources, out=memory.token_ids)
        self.embed(memory.token_ids, memory.inputs.positions, memory.state)
