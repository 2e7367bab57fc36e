"""How much memory the KV cache may take, and how it is divided among the places."""

import psutil
import torch

from neo_desktop.engine.placement import Place
from neo_desktop.engine.scheduler import SchedulerLimits
from neo_desktop.models.config import ModelConfig

BLOCK_SIZE = 16  # tokens per KV block
DEVICE_RESERVE_BYTES = 512 * 1024**2  # of a GPU: CUDA context, libraries' workspaces, fragmentation
HOST_SHARE = 0.5  # of the available host memory, at most, for the KV cache


def pool_blocks(
    config: ModelConfig,
    dtype: torch.dtype,
    limits: SchedulerLimits,
    device: torch.device,
    cache_tokens: dict[Place, int | None],
) -> dict[Place, int]:
    """Return `place -> blocks`, from the memory that is free now that the weights are loaded.

    Where there is no GPU, both places share the host's memory. No place gets more than the most requests
    with the longest contexts could use.

    Args:
        cache_tokens: `place -> tokens asked for`; None: as many as fit.

    Raises:
        MemoryError: not even one block fits, or more was asked for than there is.
    """
    host_bytes = int(psutil.virtual_memory().available * HOST_SHARE)
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        device_bytes = free_bytes - DEVICE_RESERVE_BYTES - activation_bytes(config, limits, dtype)
        available = {Place.DEVICE: max(device_bytes, 0), Place.HOST: host_bytes}
    else:
        available = {Place.DEVICE: host_bytes // 2, Place.HOST: host_bytes // 2}

    bytes_per_token = config.kv_bytes_per_token(dtype)
    most_tokens = limits.max_batch_requests * config.max_context_tokens
    blocks = {}
    for place, bytes_ in available.items():
        fitting = bytes_ // bytes_per_token
        asked = cache_tokens[place]
        if asked is not None and asked > fitting:
            raise MemoryError(
                f"a {place}-cache of {asked} tokens needs {asked * bytes_per_token / 1e9:.2f} GB of KV, "
                f"but {bytes_ / 1e9:.2f} GB are free for it: ask for at most {fitting} tokens"
            )
        blocks[place] = (min(fitting, most_tokens) if asked is None else asked) // BLOCK_SIZE
    return blocks


def activation_bytes(config: ModelConfig, limits: SchedulerLimits, dtype: torch.dtype) -> int:
    """Return the most memory that one iteration needs beside weights and KV.

    In the widest stage a token has its residual and normalised state, the gate-up product and its
    activation; attention is narrower. Each sampled request has its logits in float32, and the sampler a few
    copies of them.
    """
    per_token = 4 * config.hidden_size + 4 * config.intermediate_size
    per_request = 8 * config.vocab_size * torch.float32.itemsize
    return limits.max_batch_tokens * per_token * dtype.itemsize + limits.max_batch_requests * per_request
