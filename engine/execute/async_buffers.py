"""Buffers of async decodes, which persist between async steps (see `async_decodes`)."""

from collections.abc import Iterable

import torch
from torch import Tensor

from neo_desktop.engine.batch import MAX_ASYNC_DECODES
from neo_desktop.engine.cuda.copies import host_memory
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.models.config import ModelConfig
from neo_desktop.native.relay import empty_flags


class AsyncBuffers:
    """The state of async decodes between async steps, and their offload buffers.

    Args:
        dtype: The model's type.
        device: The model's device.
        tiers: Tiers of their KV.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, tiers: Iterable[KVTier]
    ) -> None:
        layers, heads, head_dim = config.num_layers, config.num_heads, config.head_dim
        slots = layers, MAX_ASYNC_DECODES
        qkv, out = (*slots, heads + 2 * config.num_kv_heads, head_dim), (2, *slots, heads, head_dim)
        # [set, layer of the next attention, slot]: the hidden states before that attention.
        self.waiting = torch.zeros(2, *slots, config.carried_width, dtype=dtype, device=device)
        self.qkv = host_memory(lambda pin: torch.zeros(qkv, dtype=dtype, pin_memory=pin), device)
        self.out = host_memory(lambda pin: torch.zeros(out, dtype=dtype, pin_memory=pin), device)
        self.flags = {
            tier: host_memory(lambda pin: empty_flags(layers, pinned=pin), device) for tier in tiers
        }
        rotations = layers * MAX_ASYNC_DECODES, 1, config.rotation_width
        self.cos = torch.zeros(rotations, dtype=torch.float32, device=device)
        self.sin = torch.zeros(rotations, dtype=torch.float32, device=device)
        self.newest = 0  # index of the set that the last async step wrote

    @property
    def on_host(self) -> tuple[Tensor, ...]:
        """The tensors in host memory."""
        return self.qkv, self.out, *self.flags.values()

    def end_turn(self) -> None:
        """Swap the two sets after a successful async step: the next step reads what this one wrote."""
        self.newest = 1 - self.newest
