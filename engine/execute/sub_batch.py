"""A sub-batch of an iteration: its memory, and the attention for its rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from neo_desktop.engine.execute.async_decodes import AsyncDecodes
from neo_desktop.engine.execute.host import HostBatch
from neo_desktop.engine.execute.images import ImageInputs
from neo_desktop.engine.execute.lane import Signal
from neo_desktop.engine.execute.offloaded_matmuls import OffloadedPass
from neo_desktop.engine.execute.prompts import Prompts
from neo_desktop.engine.execute.streamed import NewRows
from neo_desktop.engine.execute.workspace import Memory
from neo_desktop.engine.kv.storage import KVPool
from neo_desktop.models.operators import Store


@dataclass
class OffloadedDecodes:
    """Decodes of a sub-batch with attention on the CPU or a worker."""

    rows: slice
    batch: HostBatch
    attended: Signal | None = None  # end of the attention in the current layer


@dataclass
class DeviceDecodes:
    """Decodes of a sub-batch with attention on the device."""

    rows: slice
    pool: KVPool
    block_tables: Tensor
    context_lens: Tensor
    slots: Tensor  # target of k and v if attention stores them, not the rotation kernel
    new_rows: NewRows | None = None  # additional target of k and v if the KV is streamed


@dataclass
class SubBatchPass:
    """One sub-batch on its way through the layers."""

    memory: Memory
    offloaded: Sequence[OffloadedDecodes]
    decodes: Sequence[DeviceDecodes]
    prompts: Sequence[Prompts]
    store: Callable[[int], Store | None]  # layer -> target of k and v if the rotation kernel stores them
    last_rows: Sequence[int]  # rows that need a hidden state after the last layer
    split: OffloadedPass | None = None  # offloaded matmuls; None: the model has no offloaded matrices
    async_decodes: AsyncDecodes | None = None
    images: ImageInputs | None = None  # rows of images
