from typing import TypeAlias

# (address, dtype code, shape, strides in elements); the codes are those of native/include/neo_desktop/dtype.h
Tensor: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...]]

def cpu_features() -> dict[str, bool]: ...
def default_num_threads() -> int: ...
def available_isas() -> list[str]: ...
def paged_attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    block_tables: Tensor,
    block_size: int,
    context_lens: Tensor,
    out: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    scale: float,
    window: int,
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
def read_seconds(address: int, nbytes: int, num_threads: int, /) -> float: ...
def fma_rate(seconds: float, num_threads: int, isa: str, dtype: int, /) -> float: ...
def advise_huge_pages(address: int, nbytes: int, /) -> bool: ...
def interleave_numa_nodes(address: int, nbytes: int, /) -> bool: ...
