"""The number of splits of a context in decode attention. This module needs neither Triton nor a GPU."""

MIN_SPLIT_TOKENS = 128  # smaller splits cost more to start and merge than they save
MAX_SPLITS = 128


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
