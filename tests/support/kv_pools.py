"""KV pools as tests need them: with what must not be read."""

import torch

from neo_desktop.engine.kv.storage import KVPool
from neo_desktop.engine.kv.streamed import StreamedPool


def spoiled(pool: KVPool) -> KVPool:
    """Fill a pool with what must never be read: NaN, of int8 in the scales."""
    homes = pool.homes if isinstance(pool, StreamedPool) else ()
    for part in (*pool.parts, *homes):
        part.fill_(torch.nan if part.is_floating_point() else 99)
    return pool
