"""Decode iterations on a GPU as CUDA graphs: one launch, and no Python until the tokens are there.

    bucket      which iterations are one graph: how many rows, how long the block tables
    workspace   the memory that graphs refer to, the same for all
    layers      a decoder's arithmetic in few kernels, in place
    program     an iteration as work for lanes, written once
    streams     lanes as CUDA streams: at once, or captured
    executor    fills the memory in, starts the CPU's part, launches, collects

A plan of decodes alone is carried out like this, with the CPU's attention inside the graph:

    device     |inputs|linear 0,l|attention 0,l|linear 1,l|attention 1,l|linear 0,l+1|..|logits|tokens|
    to-host                      |qkv 0,l|flag            |qkv 1,l|flag
    (relay)                              |CPU attention 0,l|flag |CPU attention 1,l|flag
    to-device                                              |flag? o 0,l|           |flag? o 1,l|

It is the order of `pipeline`, which carries out all other plans. The flags are words in host memory that the
GPU writes and waits for as part of the graph (`cuStreamWriteValue32`, `cuStreamWaitValue32`); on the other
side is `native.relay`, which neither Python nor a lock can delay.
"""
