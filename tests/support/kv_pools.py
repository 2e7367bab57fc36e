"""KV pools as tests need them: with what must not be read, and in rows as on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from neo_desktop.engine.kv import layout
from neo_desktop.engine.kv.storage import KVPool


def spoiled(pool: KVPool) -> KVPool:
    """Fill a pool with what must never be read: NaN, of int8 in the scales."""
    for part in pool.parts:
        part.fill_(torch.nan if part.is_floating_point() else 99)
    return pool


@contextmanager
def in_rows() -> Iterator[None]:
    """Pools that are made in this context hold K in rows, whatever their block size, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "PAIRED_TOKENS", 1 << 20)
        yield
