"""Rows of KV into the cache and out of it, by slot."""

import torch
from torch import Tensor


def write_rows(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """See `dispatch.write_rows`; any caches will do."""
    if not len(slots):
        return
    # What belongs nowhere cannot be left out, since the host would have to count it. So it does what some
    # other row does again; and if there is none, it puts what a slot holds into it.
    belongs = slots >= 0
    any_belongs = belongs.any()
    first = belongs.int().argmax().view(1)
    target = torch.where(belongs, slots, slots.index_select(0, first).clamp_min(0)).long()
    place = _place(k_cache, target)
    keep = belongs.view(-1, 1, 1)
    for rows, cache in ((k, k_cache), (v, v_cache)):
        other = torch.where(any_belongs, rows.index_select(0, first), cache[_place(cache, target[:1])])
        cache.index_put_(place, torch.where(keep, rows, other))


def read_rows(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """See `dispatch.read_rows`; any caches will do."""
    if not len(slots):
        return
    place = _place(k_cache, slots.clamp_min(0).long())
    is_read = (slots >= 0).view(-1, 1, 1)
    for rows, cache in ((k, k_cache), (v, v_cache)):
        rows.copy_(torch.where(is_read, cache[place], rows))


def _place(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks, and offsets in them, of slots >= 0."""
    block_size = cache.shape[1]
    return slots // block_size, slots % block_size
