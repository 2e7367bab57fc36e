"""`python -m benchmarks.cpu_attention`: measure, show the table, write it as JSON."""

import argparse
from pathlib import Path

from benchmarks.cpu_attention.measure import run_cpu_attention
from benchmarks.cpu_attention.options import KV_DTYPES, CpuAttentionOptions
from benchmarks.shown import show

if __name__ == "__main__":
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in KV_DTYPES}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv-dtype", choices=dtypes, default="float16")
    parser.add_argument(
        "--threads", type=int, default=0, help="0: all cores but two where there are more than four"
    )
    parser.add_argument("--fragmented", action="store_true", help="scatter blocks one by one, the worst case")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    options = CpuAttentionOptions(
        dtype=dtypes[given.kv_dtype], num_threads=given.threads, fragmented=given.fragmented
    )
    show(run_cpu_attention(options, lambda share, what: print(f"{share:.0%} {what}", flush=True)), given.json)
