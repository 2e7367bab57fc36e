from collections.abc import Sequence
from typing import TypeAlias

# (name, address, dtype code, shape, strides in elements); codes as in native/include/neo_desktop/dtype.h
Tensor: TypeAlias = tuple[str, int, int, tuple[int, ...], tuple[int, ...]]
Matrix: TypeAlias = tuple[Sequence[tuple[int, int, int, int]], Tensor | None]
# q, out, block_tables, context_lens, k and v of the new tokens, block_size, scale, softcap
Decode: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, int, float, float]

# k_cache, v_cache, k_scale, v_scale, window, sinks
Layer: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor | None, int, Tensor | None]

def cpu_features() -> dict[str, bool]: ...
def num_usable_cpus() -> int: ...
def num_threads_beside_gpu() -> int: ...
def default_num_threads() -> int: ...
def set_default_num_threads(num_threads: int, /) -> None: ...
def bind_threads(wanted: bool, /) -> bool: ...
def available_isas() -> list[str]: ...
def paged_attention_decode(
    decode: Decode,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    window: int,
    sinks: Tensor | None,
    num_threads: int,
    isa: str,
    /,
) -> None: ...
def prompt_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    out: Tensor,
    window: int,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    num_threads: int,
    isa: str,
    /,
) -> None: ...
def paged_kv_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    slots: Tensor,
    num_threads: int,
    isa: str,
    /,
) -> None: ...
def paged_kv_read(
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    slots: Tensor,
    k_out: Tensor,
    v_out: Tensor,
    num_threads: int,
    isa: str,
    /,
) -> None: ...
def store_rows(rows: Tensor, slots: Tensor, into: Tensor, num_threads: int, /) -> None: ...
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    num_threads: int,
    isa: str,
    /,
) -> None: ...
def choose_experts(
    logits: Tensor,
    kind: tuple[bool, bool, float],
    bias: Tensor | None,
    factors: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    num_threads: int,
    /,
) -> None: ...
def choose_tokens(logits: Tensor, tokens: Tensor, num_threads: int, /) -> None: ...
def silu_mul(gate_up: Tensor, out: Tensor, num_threads: int, isa: str, /) -> None: ...
def rope(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: Tensor | None,
    eps: float,
    num_threads: int,
    isa: str,
    /,
) -> None: ...
def scan_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    is_delta: bool,
    state: Tensor,
    spans: Tensor,
    out: Tensor,
    num_threads: int,
    isa: str,
    /,
) -> None: ...
def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    has_silu: bool,
    state: Tensor,
    spans: Tensor,
    out: Tensor,
    num_threads: int,
    isa: str,
    /,
) -> None: ...

Columns = tuple[int, int, int]

class RowProgram:
    def __init__(
        self,
        buffers: Sequence[tuple[int, int, bool]],
        steps: Sequence[
            tuple[
                int,
                Sequence[Columns],
                Columns,
                int,
                int,
                float,
                Sequence[Tensor],
                Matrix | None,
            ]
        ],
        /,
    ) -> None: ...

def run_rows(program: RowProgram, given: Sequence[Tensor], num_threads: int, isa: str, /) -> None: ...

class PackedExperts:
    def __init__(
        self,
        count: int,
        gate: Matrix,
        up: Matrix,
        down: Matrix,
        clamped: tuple[float, float] | None,
        gate_by: str,
        /,
    ) -> None: ...

def multiply_experts(
    experts: PackedExperts, tensors: Sequence[Tensor], num_threads: int, isa: str, /
) -> None: ...
def packed_linear(
    x: Tensor,
    parts: Sequence[tuple[int, int, int, int]],
    bias: Tensor | None,
    out: Tensor,
    num_threads: int,
    isa: str,
    /,
) -> None: ...

class Recording:
    is_complete: bool
    def append(self, later: Recording, /) -> None: ...
    def __call__(self) -> None: ...

def begin_recording() -> None: ...
def end_recording() -> Recording: ...
def read_seconds(address: int, nbytes: int, num_threads: int, /) -> float: ...
def fma_rate(seconds: float, num_threads: int, isa: str, dtype: int, /) -> float: ...
def advise_huge_pages(address: int, nbytes: int, /) -> bool: ...
def interleave_numa_nodes(address: int, nbytes: int, /) -> bool: ...

class HostCaches:
    def __init__(self, layers: Sequence[Layer], /) -> None: ...

class HostTask:
    def check(self) -> None: ...
    def run(self, turn: int, num_threads: int, isa: str, /) -> None: ...

def decode_task(caches: HostCaches, decode: Decode, flags: Tensor, index: int, /) -> HostTask: ...
def rows_task(
    caches: HostCaches,
    what: str,
    to_host: bool,
    is_behind: bool,
    slots: Tensor,
    even: tuple[Tensor, Tensor],
    odd: tuple[Tensor, Tensor],
    flags: Tensor,
    /,
) -> HostTask: ...
def matmul_task(
    what: str,
    lag: int,
    matrices: Sequence[Matrix | None],
    x: Tensor,
    out: Tensor,
    flags: Tensor,
    index: int,
    /,
) -> HostTask: ...
def experts_task(
    experts: Sequence[PackedExperts | None], tensors: Sequence[Tensor], flags: Tensor, index: int, /
) -> HostTask: ...
def copy_task(
    what: str,
    sources: Sequence[tuple[int, int]],
    buffers: Sequence[tuple[int, int]],
    flags: Tensor,
    /,
) -> HostTask: ...

class RelayStalledError(RuntimeError): ...

class Relay:
    def __init__(self, num_threads: int, isa: str, /) -> None: ...
    def start(self, tasks: Sequence[HostTask], timeout_s: float = 0.0) -> None: ...
    def finish(self) -> list[tuple[int, int, int, int]]: ...
    def cancel(self) -> None: ...
    def close(self) -> bool: ...

def packed_bytes(stored_type: int, rows: int, columns: int) -> int: ...
def stored_block(stored_type: int) -> tuple[int, int]: ...
def pack_quantised(
    stored_type: int, stored: int, first: int, count: int, columns: int, packed: int
) -> bool: ...
def unpack_quantised(stored_type: int, packed: int, rows: list[int], columns: int, out: int) -> None: ...
