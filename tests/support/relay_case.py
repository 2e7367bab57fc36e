"""A native relay, and a GPU's part of its work."""

import time

import torch
from paged_case import PagedCase
from torch import Tensor

from neo_desktop.native.relay import Relay, RelayBatch, RelayLayer, empty_flags

NUM_LAYERS = 3


def relay_of(case: PagedCase, windows: tuple[int, ...] = (0,) * NUM_LAYERS) -> Relay:
    layers = [RelayLayer(case.k_cache, case.v_cache, None, None, window, case.sinks) for window in windows]
    block_size = case.k_cache.shape[2]
    return Relay(layers, block_size=block_size, scale=case.scale, softcap=case.softcap, num_threads=2)


def batch_of(case: PagedCase) -> RelayBatch:
    """Return a batch whose new K and V equal the cached ones."""
    last = [case.slots(request, length - 1) for request, length in enumerate(case.context_lens)]
    page_tokens = case.k_cache.shape[2]
    k, v = (
        torch.stack([cache[slot // page_tokens, :, slot % page_tokens] for slot in last])
        for cache in (case.k_cache, case.v_cache)
    )
    out = torch.full_like(case.q, torch.nan)
    flags = empty_flags(NUM_LAYERS, pinned=False)
    return RelayBatch(case.q, k, v, out, case.block_tables, case.context_lens, flags)


def offload(batch: RelayBatch, layer: int) -> Tensor:
    """Act as a GPU in one layer: raise the flag, wait for the other flag, take the output."""
    batch.flags[0, layer, 0] = 1
    while batch.flags[1, layer, 0].item() == 0:
        time.sleep(0)
    return batch.out.clone()
