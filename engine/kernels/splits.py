"""Into how many parts decode attention cuts contexts. Needs neither Triton nor a GPU."""

MIN_SPLIT_TOKENS = 128  # below, beginning and merging a part costs more than it brings
MAX_SPLITS = 128


def num_splits(requests: int, kv_heads: int, max_tokens: int, num_programs: int) -> int:
    """Return into how many parts contexts are cut.

    Args:
        requests: in the batch, padding included.
        kv_heads: of the model.
        max_tokens: that a request may attend to: `max_blocks * block_size`, or the window if that is less.
        num_programs: that the GPU runs at once, of this kernel. As many begin together, and so many bytes are
            under way that the memory's latency is hidden.
    """
    wanted = num_programs // (requests * kv_heads)
    return max(1, min(wanted, max_tokens // MIN_SPLIT_TOKENS, MAX_SPLITS))
