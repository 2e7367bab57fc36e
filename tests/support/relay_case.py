"""A native relay, and a GPU's part of its work."""

import time
from dataclasses import dataclass, fields

import torch
from paged_case import PagedCase
from torch import Tensor

from neo_desktop.native.relay import HostCaches, HostTask, LayerCache, Relay, empty_flags

NUM_LAYERS = 3


def relay() -> Relay:
    return Relay(num_threads=2)


def caches_of(case: PagedCase, windows: tuple[int, ...] = (0,) * NUM_LAYERS) -> HostCaches:
    layers = [LayerCache(case.k_cache, case.v_cache, None, None, window, case.sinks) for window in windows]
    block_size = case.k_cache.shape[2]
    return HostCaches(layers, block_size=block_size, scale=case.scale, softcap=case.softcap)


@dataclass(frozen=True)
class Batch:
    """The arguments of a sub-batch's attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    block_tables: Tensor
    context_lens: Tensor
    flags: Tensor
    index: int = 0

    def task(self, caches: HostCaches) -> HostTask:
        return caches.decode_task(*(getattr(self, field.name) for field in fields(self)))


def batch_of(case: PagedCase) -> Batch:
    """Return a batch whose new K and V equal the cached ones."""
    last = [case.slots(request, length - 1) for request, length in enumerate(case.context_lens)]
    page_tokens = case.k_cache.shape[2]
    k, v = (
        torch.stack([cache[slot // page_tokens, :, slot % page_tokens] for slot in last])
        for cache in (case.k_cache, case.v_cache)
    )
    out = torch.full_like(case.q, torch.nan)
    flags = empty_flags(NUM_LAYERS, pinned=False)
    return Batch(case.q, k, v, out, case.block_tables, case.context_lens, flags)


def offload(batch: Batch, layer: int) -> Tensor:
    """Act as a GPU in one layer: raise the flag, wait for the other flag, take the output."""
    batch.flags[0, layer, 0] = 1
    while batch.flags[1, layer, 0].item() == 0:
        time.sleep(0)
    return batch.out.clone()
