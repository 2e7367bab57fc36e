"""`python -m benchmarks.cpu_attention`: measure every case, and print a table."""

import argparse
import statistics
from itertools import product

from benchmarks.cpu_attention.measure import Case, measure
from benchmarks.cpu_attention.options import GROUPS, HEAD_DIMS, KV_DTYPES, Options, Shape
from benchmarks.cpu_attention.pool import Pool
from benchmarks.cpu_attention.rivals import find_rivals, rival_gb_per_s
from benchmarks.shown import print_table, progress
from neo_desktop import native
from neo_desktop.engine.profiling.hardware import last_level_cache_bytes

SECONDS, RIVAL_SECONDS = 60.0, 40.0  # for all calls together; a case makes at least three


def main() -> None:
    """Measure the cases that fit the cache."""
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in KV_DTYPES}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv-dtype", choices=dtypes, default="float16")
    parser.add_argument(
        "--threads", type=int, default=0, help="0: all cores but two where there are more than four"
    )
    parser.add_argument("--fragmented", action="store_true", help="scatter blocks one by one, the worst case")
    given = parser.parse_args()
    options = Options(dtypes[given.kv_dtype], given.threads, given.fragmented)
    pool = Pool(options)
    wanted = [
        shape
        for group, head_dim in product(GROUPS, HEAD_DIMS)
        for shape in options.shapes(group, head_dim, pool.num_blocks(group, head_dim))
    ]
    fitting = [shape for shape in wanted if shape is not None]
    rivals = find_rivals(options)
    cases: list[tuple[Shape, Case]] = []
    rows = []
    for shape in fitting:
        sizes = f"{shape.batch} x {shape.context_tokens}"
        progress(len(cases) / len(fitting), f"group {shape.group}, head_dim {shape.head_dim}, {sizes} tokens")
        case = measure(pool, options, shape, SECONDS / len(fitting))
        seconds = RIVAL_SECONDS / len(fitting) / max(len(rivals), 1)
        others = [f"{rival_gb_per_s(each, pool, options, shape, seconds):.2g}" for each in rivals]
        cases.append((shape, case))
        rows.append((sizes, shape.group, shape.head_dim, *case.cells, *others))
    headings = ("ms", "GB/s", "read GB/s", "FMA GB/s", "of limit")
    names = [rival.name for rival in rivals]
    print_table(("requests x tokens", "group", "head dim", *headings, *names), rows)
    shares = [case.limit_share for _, case in cases]
    blocks = "scattered" if options.fragmented else "in whole pages"
    print(
        f"{given.kv_dtype} KV, blocks {blocks}, {options.threads} threads, {native.default_isa()}: the "
        f"kernel reaches {min(shares):.0%} to {max(shares):.0%} of its limit, "
        f"{statistics.median(shares):.0%} in the middle. Largest error against 64 bits: "
        f"{max(case.relative_error for _, case in cases):.0e}.\n"
        f"KV cache of {pool.nbytes / 1e6:.0f} MB; the last-level cache has "
        f"{last_level_cache_bytes() / 1e6:.0f} MB. {len(wanted) - len(fitting)} cases do not fit."
    )


if __name__ == "__main__":
    main()
