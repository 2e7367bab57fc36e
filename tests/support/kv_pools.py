"""KV pools as tests need them: with what must not be read."""

import torch

from neo_desktop.engine.kv.storage import KVPool


def spoiled(pool: KVPool) -> KVPool:
    """Fill a pool with what must never be read: NaN, of int8 in the scales."""
    for part in pool.parts:
        part.fill_(torch.nan if part.is_floating_point() else 99)
    return pool
