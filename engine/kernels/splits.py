"""Into how many parts decode attention cuts contexts. Needs neither Triton nor a GPU."""

PROGRAMS_PER_SM = 4  # enough bytes under way to hide the memory's latency, and to even out unequal lengths
MIN_SPLIT_TOKENS = 128  # below, beginning and merging a part costs more than it brings
MAX_SPLITS = 128


def num_splits(requests: int, kv_heads: int, max_tokens: int, num_sms: int) -> int:
    """Return into how many parts contexts are cut.

    Args:
        requests: in the batch, padding included.
        kv_heads: of the model.
        max_tokens: that a request may attend to: `max_blocks * block_size`, or the window if that is less.
        num_sms: of the GPU.
    """
    wanted = num_sms * PROGRAMS_PER_SM // (requests * kv_heads)
    return max(1, min(wanted, max_tokens // MIN_SPLIT_TOKENS, MAX_SPLITS))
