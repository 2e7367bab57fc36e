"""How the KV of a request is cut: into blocks, and runs of blocks.

tokens   0 … 15 | 16 … 31 | 32 … 47 | 48 … 63 | 64 … 79 | …
blocks      0        1         2         3         4
runs     |                 0                  |        1
"""

BLOCK_SIZE = 16  # tokens of a block

# Blocks of an aligned run, which is a page of host memory, see `HostLayer`: what lies in one piece there. It
# is as many tokens as the CPU's attention kernel takes in one step.
BLOCKS_PER_RUN = 4
