"""Attention workers for tests: in a thread of this process, listening on this computer."""

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from neo_desktop.engine.kv.storage import KVPool
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.remote.link import Address, Trust, WorkerLink
from neo_desktop.engine.remote.pool import RemotePool
from neo_desktop.engine.remote.shape import AttentionShape
from neo_desktop.engine.remote.worker import AttentionWorker
from neo_desktop.models.decoder import Decoder

SECRET = b"a secret of sixteen letters at least"
TRUST = Trust(SECRET, timeout_s=20.0)


@contextmanager
def running_worker(
    memory_bytes: int = 1 << 24, secret: bytes = SECRET
) -> Iterator[tuple[AttentionWorker, Address]]:
    """Run a worker; yield it and its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = Address(*listener.getsockname())
    worker = AttentionWorker(listener, secret, memory_bytes)
    thread = threading.Thread(target=worker.serve, daemon=True)
    thread.start()
    try:
        yield worker, address
    finally:
        worker.close()
        thread.join(60)
        assert not thread.is_alive()


def shape_of(model: Decoder, block_size: int, kv_dtype: torch.dtype | None = None) -> AttentionShape:
    return AttentionShape.of(model.config, block_size, model.dtype, kv_dtype)


def sinks_of(model: Decoder) -> torch.Tensor | None:
    return None if model.sinks is None else torch.stack(list(model.sinks))


def connected(model: Decoder, tier: KVTier, address: Address, num_blocks: int, block_size: int) -> RemotePool:
    """Return the pool of a connected worker."""
    link = WorkerLink(tier.name, lambda: address, TRUST)
    link.open(shape_of(model, block_size), sinks_of(model), num_blocks)
    return RemotePool(tier, model.config, block_size, model.dtype, link)


def with_workers(
    model: Decoder,
    pools: Mapping[KVTier, KVPool],
    addresses: list[Address],
    num_blocks: int,
    block_size: int,
) -> dict[KVTier, KVPool]:
    """Return pools extended by one pool per worker."""
    found = dict(pools)
    for number, address in enumerate(addresses, 1):
        tier = KVTier.worker(number)
        found[tier] = connected(model, tier, address, num_blocks, block_size)
    return found
