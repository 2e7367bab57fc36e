"""What lasts from one turn of async decodes to the next (see `async_decodes`)."""

from collections.abc import Iterable

import torch
from torch import Tensor

from neo_desktop.engine.batch import MAX_ASYNC_DECODES
from neo_desktop.engine.cuda.copies import host_memory
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.models.config import ModelConfig
from neo_desktop.native.relay import empty_flags


class AsyncBuffers:
    """What async decodes leave for the next turn, and their hand-over to whoever attends.

    Args:
        config: the model's.
        dtype: likewise.
        device: likewise.
        tiers: where their KV may lie.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, tiers: Iterable[KVTier]
    ) -> None:
        layers, heads, head_dim = config.num_layers, config.num_heads, config.head_dim
        slots = layers, MAX_ASYNC_DECODES
        qkv, out = (*slots, heads + 2 * config.num_kv_heads, head_dim), (2, *slots, heads, head_dim)
        # By set and by the layer whose attention is next: the hidden states before it.
        self.waiting = torch.zeros(2, *slots, config.carried_width, dtype=dtype, device=device)
        self.qkv = host_memory(lambda pin: torch.zeros(qkv, dtype=dtype, pin_memory=pin), device)
        self.out = host_memory(lambda pin: torch.zeros(out, dtype=dtype, pin_memory=pin), device)
        self.flags = {
            tier: host_memory(lambda pin: empty_flags(layers, pinned=pin), device) for tier in tiers
        }
        rotations = layers * MAX_ASYNC_DECODES, 1, config.rotation_width
        self.cos = torch.zeros(rotations, dtype=torch.float32, device=device)
        self.sin = torch.zeros(rotations, dtype=torch.float32, device=device)
        self.newest = 0  # which of the two sets the last turn has written

    @property
    def on_host(self) -> tuple[Tensor, ...]:
        """What lies in host memory."""
        return self.qkv, self.out, *self.flags.values()

    def end_turn(self) -> None:
        """Take in that a turn has ended well: what it wrote is what the next one reads."""
        self.newest = 1 - self.newest
