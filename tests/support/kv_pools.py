"""KV pools with contents that tests must not read."""

import torch

from neo_desktop.engine.kv.storage import KVPool
from neo_desktop.engine.kv.streamed import StreamedPool


def spoiled(pool: KVPool) -> KVPool:
    """Fill a pool with forbidden values: NaN, in int8 pools only in the scales."""
    homes = pool.homes if isinstance(pool, StreamedPool) else ()
    for part in (*pool.parts, *homes):
        part.fill_(torch.nan if part.is_floating_point() else 99)
    return pool
