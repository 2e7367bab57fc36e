"""A second GPU of this computer as memory for KV: which one, and how much of it (`--peer-gpu`)."""

import logging
from dataclasses import replace

import torch

from neo_desktop.engine.cuda.errors import is_device_lost, is_lost
from neo_desktop.engine.kv.layer import block_bytes
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv.peer import PeerPool, check_copies
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.ladder import ladder
from neo_desktop.engine.parts import EngineParts
from neo_desktop.engine.placement import Place
from neo_desktop.engine.profiling.budget import DEVICE_RESERVE_BYTES

logger = logging.getLogger(__name__)

LEAST_BLOCKS = 16


def second_gpu(index: int, device: torch.device) -> torch.device:
    """Return the GPU of that number.

    Args:
        device: the model's.

    Raises:
        ValueError: there is no such GPU, or it is the model's.
    """
    if device.type != "cuda":
        raise ValueError("--peer-gpu needs a model that runs on another GPU, but it would run on the CPU")
    count = torch.cuda.device_count()
    if index >= count:
        raise ValueError(f"there is no GPU {index} for --peer-gpu: this computer has {count}, from 0 on")
    if index == (torch.cuda.current_device() if device.index is None else device.index):
        raise ValueError(f"--peer-gpu is another GPU than the model's, which runs on GPU {index}")
    return torch.device("cuda", index)


def free_bytes(device: torch.device) -> int:
    """Return how much of a GPU's memory KV may take."""
    return max(torch.cuda.mem_get_info(device)[0] - DEVICE_RESERVE_BYTES, 0)


def check_second_gpu(device: torch.device, home: torch.device) -> None:
    """See to it that what is copied between two GPUs arrives, if need be through host memory.

    Args:
        home: the model's.

    Raises:
        RuntimeError: it does not, on either way.
    """
    reason = _reason_against(device, home)
    if reason is not None and ladder.rung("peer_copies") == "direct":
        ladder.limit("peer_copies", "through-host", reason)
        reason = _reason_against(device, home)
    if reason is not None:
        raise RuntimeError(
            f"GPU {device.index} cannot be used as the second one: {reason}; leave --peer-gpu out"
        )


def _reason_against(device: torch.device, home: torch.device) -> str | None:
    """Return what is wrong with copies between two devices, as a clause; None: nothing is."""
    try:
        num_bytes = check_copies(home, device)
    except RuntimeError as error:
        if is_lost(error) or is_device_lost(error):
            raise
        return f"a copy was refused: {str(error).partition(chr(10))[0]}"
    if num_bytes is None:
        return None
    return f"of {num_bytes:,} bytes that were copied not all arrived; an IOMMU may stand between the cards"


def with_second_gpu(parts: EngineParts, device: torch.device, num_bytes: int) -> EngineParts:
    """Take memory on another device, and add it to an engine's parts.

    Args:
        num_bytes: at most.

    Raises:
        MemoryError: there is no room for what measuring takes.
        RuntimeError: see `check_second_gpu`.
    """
    check_second_gpu(device, parts.model.decoder.device)
    decoder, config = parts.model.decoder, parts.model.config
    most = parts.limits.max_batch_requests * config.max_context_tokens // BLOCK_SIZE
    of_block = config.num_layers * block_bytes(config, BLOCK_SIZE, decoder.dtype)
    num_blocks = min(num_bytes // of_block, most)
    if num_blocks < LEAST_BLOCKS:
        least_mb = LEAST_BLOCKS * of_block / 1e6
        raise MemoryError(
            f"the second GPU has {num_bytes / 1e6:,.0f} MB for KV, and {least_mb:,.1f} MB are the least: "
            "leave --peer-gpu out"
        )
    if device.type == "cuda":
        with torch.cuda.device(device):
            pool = _pool(parts, device, num_blocks)
    else:
        pool = _pool(parts, device, num_blocks)
    logger.info("the second GPU has room for %d tokens of KV", num_blocks * BLOCK_SIZE)
    pools = {place: parts.storage[place] for place in parts.storage.places}
    return replace(
        parts,
        num_blocks=parts.num_blocks | {Place.PEER: num_blocks},
        storage=KVStorage({**pools, Place.PEER: pool}),
    )


def _pool(parts: EngineParts, device: torch.device, num_blocks: int) -> PeerPool:
    decoder = parts.model.decoder
    return PeerPool(
        parts.model.config,
        num_blocks,
        BLOCK_SIZE,
        decoder.dtype,
        device,
        decoder.device,
        sinks=decoder.sinks,
    )
