"""Division of a request's KV into blocks and runs of blocks:

tokens   0–15 | 16–31 | 32–47 | 48–63 | 64–79 | …
blocks     0  |   1   |   2   |   3   |   4   | …
runs                  0               |   1     …
"""

BLOCK_SIZE = 16  # tokens per block

# Blocks of an aligned run, which is one contiguous page in host memory, see `HostLayer`. A run has as many
# tokens as the CPU's attention kernel reads in one step.
BLOCKS_PER_RUN = 4


def full_runs(num_blocks: float) -> int:
    """Return how many of these blocks fill whole runs."""
    return int(num_blocks) // BLOCKS_PER_RUN * BLOCKS_PER_RUN


def in_whole_runs(tokens: int) -> int:
    """Return the tokens of the runs that hold this many, the unit of allocation."""
    run = BLOCK_SIZE * BLOCKS_PER_RUN
    return -(-tokens // run) * run
