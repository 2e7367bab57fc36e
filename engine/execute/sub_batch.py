"""A sub-batch of an iteration: its memory, and who attends for which of its rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from neo_desktop.engine.execute.async_decodes import AsyncDecodes
from neo_desktop.engine.execute.host import HostBatch
from neo_desktop.engine.execute.lane import Signal
from neo_desktop.engine.execute.offloaded_matmuls import OffloadedPass
from neo_desktop.engine.execute.prompts import Prompts
from neo_desktop.engine.execute.streamed import NewRows
from neo_desktop.engine.execute.workspace import Memory
from neo_desktop.engine.kv.storage import KVPool
from neo_desktop.models.operators import Store


@dataclass
class OffloadedDecodes:
    """Decodes of a sub-batch that the CPU attends for, by way of a workspace."""

    rows: slice
    batch: HostBatch
    attended: Signal | None = None  # the CPU's part, in the layer reached


@dataclass
class DeviceDecodes:
    """Decodes of a sub-batch that the device attends for."""

    rows: slice
    pool: KVPool
    block_tables: Tensor
    context_lens: Tensor
    slots: Tensor  # where attention stores k and v, if they are not stored with the rotation
    new_rows: NewRows | None = None  # where k and v go besides, if the pool is swapped


@dataclass
class SubBatchPass:
    """One sub-batch on its way through the layers."""

    memory: Memory
    offloaded: Sequence[OffloadedDecodes]
    decodes: Sequence[DeviceDecodes]
    prompts: Sequence[Prompts]
    store: Callable[[int], Store | None]  # where k and v of a layer go with the rotation
    last_rows: Sequence[int]  # whose hidden states are needed after all layers
    split: OffloadedPass | None = None  # its products with offloaded matrices; None: the model has none
    async_decodes: AsyncDecodes | None = None
