"""The kernels in Triton; only `kernels.dispatch` imports them, where Triton is there.

All were checked in Triton's interpreter, against float64 and the torch code in `models`, and compiled for
compute capabilities 7.5, 8.0, 8.6, 8.9, 9.0 and 12.0 by Triton 3.9 (tests/kernels). They have not run on a
GPU: `scripts/gpu_check.py` checks them there and prints their bandwidth. Sizes of tiles and numbers of warps
follow from what the compiler reports, and are not tuned.

Every launch says `enable_fp_fusion=True`, since the default differs between versions: a product and a sum may
become one FMA.
"""
