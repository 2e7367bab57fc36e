"""Native kernels: decode attention over a paged KV cache on the CPU.

The instruction set is chosen at run time; NEO_DESKTOP_ISA in the environment forces one of
`available_isas()`.

Threads: calls share one pool of workers, which sleep between calls; the calling thread takes part, and the
GIL is released. Any number of threads may call at once. A forked child makes its own pool on first use. The
default number of threads follows the CPUs that the process may use, unless `set_default_num_threads` sets it.
Workers are bound to one CPU each. `bind_threads(False)` leaves the placement of later workers to the system;
`bind_threads(True)` returns True if the system permits binding.
"""

from neo_desktop.native._native import (
    PackedExperts,
    Recording,
    available_isas,
    bind_threads,
    cpu_features,
    default_num_threads,
    num_threads_beside_gpu,
    num_usable_cpus,
    set_default_num_threads,
)
from neo_desktop.native.arguments import (
    View,
    default_isa,
    follow_isa,
    view_of,
)
from neo_desktop.native.attention import (
    empty_paired_keys,
    paged_attention_decode,
    paged_kv_read,
    paged_kv_write,
    prompt_attention,
    store_rows,
)
from neo_desktop.native.hardware import (
    advise_huge_pages,
    fma_rate,
    interleave_numa_nodes,
    read_bandwidth,
    read_seconds,
)
from neo_desktop.native.operators import (
    add_rms_norm,
    choose_experts,
    choose_tokens,
    rope,
    silu_mul,
)
from neo_desktop.native.packed import (
    DENSE_TYPES,
    STORED_TYPES,
    Matrix,
    multiply_experts,
    pack_quantised,
    packed_bytes,
    packed_experts,
    packed_linear,
    unpack_quantised,
)
from neo_desktop.native.recording import recorded
from neo_desktop.native.recurrent import (
    scan_state,
    short_convolution,
)
from neo_desktop.native.row_program import (
    Buffer,
    Columns,
    RowProgram,
    Step,
)

__all__ = [
    "DENSE_TYPES",
    "STORED_TYPES",
    "Buffer",
    "Columns",
    "Matrix",
    "PackedExperts",
    "Recording",
    "RowProgram",
    "Step",
    "View",
    "add_rms_norm",
    "advise_huge_pages",
    "available_isas",
    "bind_threads",
    "choose_experts",
    "choose_tokens",
    "cpu_features",
    "default_isa",
    "default_num_threads",
    "empty_paired_keys",
    "fma_rate",
    "follow_isa",
    "interleave_numa_nodes",
    "multiply_experts",
    "num_threads_beside_gpu",
    "num_usable_cpus",
    "pack_quantised",
    "packed_bytes",
    "packed_experts",
    "packed_linear",
    "paged_attention_decode",
    "paged_kv_read",
    "paged_kv_write",
    "prompt_attention",
    "read_bandwidth",
    "read_seconds",
    "recorded",
    "rope",
    "scan_state",
    "set_default_num_threads",
    "short_convolution",
    "silu_mul",
    "store_rows",
    "unpack_quantised",
    "view_of",
]
