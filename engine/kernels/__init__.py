"""Triton kernels for the GPU's half of an iteration: decode attention, and what lies between matrix products.

    paged_decode   attention of new tokens over the paged KV cache
    rope_append    rotation of queries and keys, and KV into the cache
    norm           residual addition and RMSNorm
    activation     gated SiLU
    row_copy       rows of KV into the cache and out of it, by slot

The functions only launch. They allocate nothing, read nothing back, and what they launch depends on shapes
alone: CUDA graphs can hold it. They are lower than everything else in the engine. Nothing may import them
where there is no GPU, since Triton comes with torch for CUDA only.

`engine.kv.device_layer` uses decode attention and copies of rows, `engine.execute.graphs` the others. All
were checked in Triton's interpreter, against float64 and the torch code in `models`, and compiled for compute
capabilities 7.5, 8.0, 8.6, 8.9 and 9.0 by Triton 3.6 to 3.9, copies of rows by 3.9 only (tests/kernels). They
have not run on a GPU: `scripts/gpu_check.py` checks them there and prints their bandwidth. Sizes of tiles and
numbers of warps follow from what the compiler reports, and are not tuned.

Every launch says `enable_fp_fusion=True`, since the default differs between versions: a product and a sum may
become one FMA.
"""
