"""Measures a second GPU: what a layer's attention takes there, the way there and back included."""

from collections.abc import Callable

import torch
from torch import Tensor

from neo_desktop.engine.execute.peer import PeerDecodes
from neo_desktop.engine.kv.peer import PeerPool, peer_of
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.placement import Place
from neo_desktop.engine.predict.cost_model import Surface
from neo_desktop.engine.profiling.workers import STORED_TOKENS, over_grid
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.stages import Scratch, State


@torch.inference_mode()
def measured_peer(pool: PeerPool, decoder: Decoder) -> Surface:
    """Return what decode attention takes there per layer, in ms: over (requests, context).

    Whatever the memory held is lost.
    """
    config, dtype = decoder.config, decoder.dtype
    devices = [device for device in (pool.home, pool.device) if device.type == "cuda"]
    num_tokens = min(STORED_TOKENS, pool.num_blocks * pool.block_size)

    def prepare(tables: Tensor, lens: Tensor) -> Callable[[], None]:
        rows = len(lens)
        state = State.empty(config, rows, dtype, pool.home, Scratch.empty(config, rows, dtype, pool.home))
        state.qkv.normal_()
        last = tables[:, -1].to(torch.int64) * pool.block_size + (lens - 1) % pool.block_size
        there = (tables.to(pool.device), lens.to(pool.device), last.to(pool.device))
        decodes = PeerDecodes(slice(0, rows), pool, config, *there)

        def run() -> None:
            decodes.attend(0, state)
            for device in devices:
                torch.cuda.synchronize(device)

        return run

    if pool.device.type != "cuda":
        _store(pool, num_tokens, dtype)
        return over_grid(pool, prepare)
    with torch.cuda.device(pool.device):
        _store(pool, num_tokens, dtype)
        return over_grid(pool, prepare)


def measured_peers(storage: KVStorage, decoder: Decoder) -> dict[Place, Surface]:
    """Return what attention takes in the place of a second GPU, if there is one."""
    found = {place: peer_of(storage[place]) for place in storage.places}
    return {place: measured_peer(pool, decoder) for place, pool in found.items() if pool is not None}


def _store(pool: PeerPool, num_tokens: int, dtype: torch.dtype) -> None:
    rows = torch.randn(2, num_tokens, *pool.row_shape, dtype=dtype, device=pool.device)
    pool.layer(0).write(rows[0], rows[1], torch.arange(num_tokens, device=pool.device))
