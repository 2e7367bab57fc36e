"""Splits of a context in decode attention, which keep a large GPU busy with few requests."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

MIN_SPLIT_TOKENS = 128  # smaller splits cost more to start and merge than they save
MAX_SPLITS = 128
# Compute capability -> programs of decode attention on a multiprocessor at once: with 4 query heads per KV
# head, head_dim 128 and 16 bits, as compiled by Triton 3.7. tests/kernels/test_compile.py compares.
PROGRAMS_PER_SM: Mapping[int, int] = MappingProxyType({75: 4, 80: 4, 86: 2, 89: 2, 90: 6, 120: 2})
PROGRAMS_ELSEWHERE = 4


def programs_per_sm(device: torch.device) -> int:
    """Return how many programs of decode attention a multiprocessor runs at once, about."""
    if device.type != "cuda":  # Triton's interpreter
        return PROGRAMS_ELSEWHERE
    major, minor = torch.cuda.get_device_capability(device)
    return PROGRAMS_PER_SM.get(10 * major + minor, PROGRAMS_ELSEWHERE)


def num_splits(requests: int, kv_heads: int, max_tokens: int, num_programs: int) -> int:
    """Return the number of splits per context.

    Args:
        requests: Number of requests in the batch, padding included.
        max_tokens: Most tokens that a request attends to: `max_blocks * block_size`, or the window if less.
        num_programs: Number of this kernel's programs that the GPU runs at once. If at least this number of
            programs start together, enough bytes are in flight to hide the memory's latency.
    """
    wanted = num_programs // (requests * kv_heads)
    return max(1, min(wanted, max_tokens // MIN_SPLIT_TOKENS, MAX_SPLITS))
