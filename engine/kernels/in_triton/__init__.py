"""The kernels in Triton; only `kernels.dispatch` imports them, if Triton is installed.

Tests check all kernels in Triton's interpreter, against float64 and the torch code in `models`. Triton 3.9
compiles them for compute capabilities 7.5, 8.0, 8.6, 8.9, 9.0 and 12.0 (tests/kernels). They have not run on
a GPU: `scripts/gpu_check.py` checks them there and prints their bandwidth. Tile sizes and warp counts follow
from the compiler's reports and are not tuned.

Every launch sets `enable_fp_fusion=True`, which allows FMAs, because the default differs between versions.
"""
