"""Compiles the Triton kernels for absent GPUs; a program, because other processes may use the interpreter.

    python compile_kernels.py 0 2 ""    prints the first of two halves, so two processes can share the work
    python compile_kernels.py 0 1 "row" prints variants whose names have this expression

The output has one JSON line per kernel and GPU, with the fields of `Compiled`. The launch functions run
unchanged, on tensors without memory: so the compiled code is a GPU's code, with all specialisations. A fake
CUDA driver names the GPU.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from sass import BARRIER, SHARED_LOAD, WIDE_LOAD, count, instructions, main_loop, usage
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from neo_desktop import native
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kernels.in_triton.activation import gated
from neo_desktop.engine.kernels.in_triton.experts import add_up, choose_experts, in_blocks, multiply_floats
from neo_desktop.engine.kernels.in_triton.host_tiles import unpack_quantised
from neo_desktop.engine.kernels.in_triton.norm import add_rms_norm
from neo_desktop.engine.kernels.in_triton.paged_decode import paged_decode
from neo_desktop.engine.kernels.in_triton.quantised import (
    dequantise,
    inputs_of,
    multiply_packed,
    multiply_pairs,
)
from neo_desktop.engine.kernels.in_triton.recurrent import scan_state, short_convolution
from neo_desktop.engine.kernels.in_triton.rope_append import rope_append
from neo_desktop.engine.kernels.in_triton.row_copy import read_rows, write_rows
from neo_desktop.engine.kernels.occupancy import programs_per_sm
from neo_desktop.models.experts_config import ClampedGate, Gating
from neo_desktop.models.linear.grouped import Grouped
from neo_desktop.models.linear.stacked import Stacked
from neo_desktop.models.recurrent import Spans

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True, slots=True)
class Compiled:
    """Figures of one kernel on one GPU."""

    variant: str
    capability: int  # 86 means 8.6
    kernel: str
    registers: int
    spilled: int  # bytes per thread in local memory
    shared: int  # bytes per program
    programs_per_sm: int
    # Decode attention: per 32 tokens of its loop. Others: in the longest loop, or in the whole kernel.
    instructions: int
    per_1000_weights: int  # instructions of a thread in products with integers, prologue included; others: 0
    wide_loads: int  # loads of 16 bytes
    shared_loads: int
    barriers: int


class AbsentGPU:
    """CUDA driver with just the functions that compilation needs."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability  # kernels are cached per device, so each GPU needs its own number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


def compile_instead_of_launching(found: list[tuple[str, Any]]) -> None:
    """Collect kernels instead of launching them, each once per launch."""
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append((self.__name__, run(self, *args, grid=grid, warmup=True, **options)))

    JITFunction.run = compile_only


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def decode(
    dtype: torch.dtype,
    group: int,
    head_dim: int,
    *,
    kv_heads: int = 8,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    q = empty(4, kv_heads * group, head_dim, dtype=dtype)
    cache = empty(64, 16, kv_heads, head_dim, dtype=dtype)
    tables, lens = empty(4, 64, dtype=torch.int32), empty(4, dtype=torch.int32)
    partial_out = empty(4, kv_heads * group, 16, head_dim, dtype=FP32)
    partial_lse = empty(4, kv_heads * group, 16, dtype=FP32)
    tensors = q, cache, cache, tables, lens, torch.empty_like(q), partial_out, partial_lse
    paged_decode(*tensors, head_dim**-0.5, window, None, softcap)


def rope(dtype: torch.dtype, *, normed: bool, head_dim: int = 128) -> None:
    heads, kv_heads, tokens = 32, 8, 4
    qkv = empty(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    angles = empty(tokens, 1, head_dim, dtype=FP32)
    cache = empty(64, 16, kv_heads, head_dim, dtype=dtype)
    weights = empty(heads + kv_heads, head_dim, dtype=dtype) if normed else None
    slots = empty(tokens, dtype=torch.int32)  # the slots of a graph
    rope_append(qkv, angles, angles, slots, cache, cache, weights, 1e-6)


def norm(dtype: torch.dtype, hidden: int) -> None:
    rows = empty(4, hidden, dtype=dtype)
    add_rms_norm(rows, rows, empty(hidden, dtype=dtype), 1e-6, rows)


def gates(dtype: torch.dtype, how: Gating = "silu") -> None:
    gated(empty(4, 2 * 14336, dtype=dtype), how, empty(4, 14336, dtype=dtype))


def copy(dtype: torch.dtype) -> None:
    cache = empty(64, 16, 8, 128, dtype=dtype)
    slots, rows = empty(4, dtype=torch.int64), empty(2, 4, 8, 128, dtype=dtype)
    write_rows(rows[0], rows[1], cache, cache, slots)
    read_rows(rows[0], rows[1], cache, cache, slots)


def product(type_name: str, dtype: torch.dtype, count: int, *, rows: int = 14336) -> None:
    weight = Grouped(type_name, rows, COLUMNS, torch.device("meta"))
    multiply_packed(empty(count, COLUMNS, dtype=dtype), [weight], None, empty(count, rows, dtype=dtype))


def exact(launch: Callable[..., None], *arguments: Any) -> None:
    """Compile the kernels that multiply floats."""
    with fallbacks.at_levels({"quantised": "exact"}):
        launch(*arguments)


def floats(type_name: str, dtype: torch.dtype) -> None:
    weight = Grouped(type_name, 14336, 4096, torch.device("meta"))
    dequantise(weight, 4096, empty(1024, 4096, dtype=dtype))


def host_tiles(type_name: str, dtype: torch.dtype) -> None:
    packed = empty(native.packed_bytes(type_name, 1024, 4096), dtype=torch.uint8)
    unpack_quantised(type_name, packed, empty(1024, 4096, dtype=dtype))


def scan(rows: int, keys: tuple[int, int], values: tuple[int, int], *, is_delta: bool) -> None:
    """Compile a scan; keys and values: heads and their size."""
    spans = Spans(empty(4, 4, dtype=torch.int32), rows)
    q, v = empty(4 * rows, *keys, dtype=FP32), empty(4 * rows, *values, dtype=FP32)
    decay, state = empty(*v.shape[:2], dtype=FP32), empty(8, values[0], keys[1], values[1], dtype=FP32)
    scan_state(q, q, v, decay, decay, state, spans, torch.empty_like(v), is_delta=is_delta)


def recurrent(dtype: torch.dtype, rows: int) -> None:
    """Compile DeltaNet and its convolution, as in Qwen3.5."""
    scan(rows, (16, 128), (32, 128), is_delta=True)
    spans = Spans(empty(4, 4, dtype=torch.int32), rows)
    x, weight = empty(4 * rows, 8192, dtype=dtype), empty(4, 8192, dtype=FP32)
    past = empty(8, 3, 8192, dtype=FP32)
    short_convolution(x, weight, None, past, spans, torch.empty_like(x), has_silu=True)


def choice(dtype: torch.dtype) -> None:
    rows, experts, of_each = 4, 128, 8
    ids, weights = empty(rows, of_each, dtype=torch.int32), empty(rows, of_each, dtype=FP32)
    choose_experts(empty(rows, experts, dtype=dtype), True, ids, weights)
    in_blocks(ids, rows, experts, 4)
    products, out = empty(rows * of_each, 2048, dtype=dtype), empty(rows, 2048, dtype=dtype)
    for adds in (False, True):
        add_up(products, ids, weights, out, adds=adds)


def experts(dtype: torch.dtype, block: int, type_name: str | None = None) -> None:
    """Return the down matrices of 128 experts, as in Qwen3-30B-A3B."""
    rows, columns, blocks = 2048, 768, 32
    ids = empty(blocks, 1, dtype=torch.int32)
    x, out = empty(blocks, columns, dtype=dtype), empty(blocks, rows, dtype=dtype)
    places = empty(blocks, block, dtype=torch.int32)
    if type_name is None:
        weight = empty(128 * rows, columns, dtype=dtype)
        multiply_floats(x, 1, Stacked(weight, None, rows), weight, ids, places, out)
    else:
        grouped = Grouped(type_name, 128 * rows, columns, torch.device("meta"))
        multiply_pairs(inputs_of(x), 1, grouped, None, rows, ids, places, out)


ATTENTION = ("_attend", "attend_plain")
COLUMNS = 4096  # of the products' matrices
ANYTHING = re.compile("")
FP16_GPUS = (75, 80, 86, 89, 90, 120)
BF16_GPUS = (80, 86, 89, 90, 120)  # 7.5 lacks bf16

# variant -> (launch function, GPUs)
VARIANTS: dict[str, tuple[Callable[[], None], tuple[int, ...]]] = {
    "decode fp16, group 1, head_dim 128": (lambda: decode(FP16, 1, 128), FP16_GPUS),
    "decode fp16, group 2, head_dim 128": (lambda: decode(FP16, 2, 128), (75,)),
    "decode fp16, group 4, head_dim 128": (lambda: decode(FP16, 4, 128), FP16_GPUS),
    "decode fp16, group 7, head_dim 128": (lambda: decode(FP16, 7, 128), (75,)),
    "decode fp16, group 4, head_dim 64": (lambda: decode(FP16, 4, 64), (75, 86)),
    "decode fp16, group 8, head_dim 128, window": (lambda: decode(FP16, 8, 128, window=4096), FP16_GPUS),
    "decode bf16, group 1, head_dim 64": (lambda: decode(BF16, 1, 64), (80,)),
    "decode bf16, group 4, head_dim 128": (lambda: decode(BF16, 4, 128), BF16_GPUS),
    "decode bf16, group 8, head_dim 128, window": (lambda: decode(BF16, 8, 128, window=4096), BF16_GPUS),
    # Not on 8.6 and 8.9: there these heads spill 8 bytes, with a cap or without.
    "decode bf16, group 2, head_dim 256, softcap": (
        lambda: decode(BF16, 2, 256, softcap=50.0),
        (80, 90, 120),
    ),
    "decode fp16, group 2, head_dim 256, softcap": (lambda: decode(FP16, 2, 256, softcap=50.0), (75,)),
    "decode bf16, group 2, head_dim 128, softcap": (lambda: decode(BF16, 2, 128, softcap=50.0), (86,)),
    "decode fp16, group 7, head_dim 80": (lambda: decode(FP16, 7, 80), (75, 86)),
    "decode fp16, group 8, head_dim 256": (lambda: decode(FP16, 8, 256), (75, 90)),
    "decode bf16, group 8, head_dim 512": (lambda: decode(BF16, 8, 512), BF16_GPUS),
    "decode fp16, group 4, head_dim 512": (lambda: decode(FP16, 4, 512), FP16_GPUS),
    "decode fp32, group 4, head_dim 512": (lambda: decode(FP32, 4, 512), (75, 86)),
    "decode fp16, group 16, head_dim 128": (lambda: decode(FP16, 16, 128), (75,)),
    "decode fp32, group 4, head_dim 128": (lambda: decode(FP32, 4, 128), (75, 86)),
    "decode fp16, group 71, head_dim 64": (lambda: decode(FP16, 71, 64, kv_heads=1), (75, 86, 120)),
    "decode fp32, group 48, head_dim 128": (lambda: decode(FP32, 48, 128, kv_heads=1), (75, 86)),
    "decode fp32, group 71, head_dim 64": (lambda: decode(FP32, 71, 64, kv_heads=1), (75, 86)),
    "rope fp16": (lambda: rope(FP16, normed=False), (75, 86)),
    "rope fp16, norm": (lambda: rope(FP16, normed=True), FP16_GPUS),
    "rope fp16, norm, head_dim 80": (lambda: rope(FP16, normed=True, head_dim=80), (75, 86)),
    "rope bf16, norm": (lambda: rope(BF16, normed=True), (80,)),
    "norm fp16": (lambda: norm(FP16, 4096), FP16_GPUS),
    "norm fp16, hidden 16384": (lambda: norm(FP16, 16384), (75,)),
    "norm bf16": (lambda: norm(BF16, 4096), (80,)),
    "silu fp16": (lambda: gates(FP16), FP16_GPUS),
    "clamped gate bf16": (lambda: gates(BF16, ClampedGate()), (80,)),
    "copy fp16": (lambda: copy(FP16), FP16_GPUS),
    "copy fp32": (lambda: copy(FP32), (75,)),
    "1 row fp16, Q4_K": (lambda: product("Q4_K", FP16, 1), FP16_GPUS),
    "1 row fp16, Q4_K, few rows": (lambda: product("Q4_K", FP16, 1, rows=1024), (75, 90)),
    "4 rows fp16, Q4_K": (lambda: product("Q4_K", FP16, 4), (75, 86, 120)),
    "16 rows fp16, Q4_K": (lambda: product("Q4_K", FP16, 16), FP16_GPUS),
    "64 rows fp16, Q4_K": (lambda: product("Q4_K", FP16, 64), (75, 86)),
    **{
        f"{rows} row{'s' * (rows > 1)} fp16, {name}": (partial(product, name, FP16, rows), (75, 86))
        for name in ("Q4_0", "Q6_K", "Q8_0", "MXFP4")
        for rows in (1, 4, 16)
    },
    "1 row fp16, IQ4_XS": (lambda: product("IQ4_XS", FP16, 1), (86,)),
    "1 row fp16, Q2_K": (lambda: product("Q2_K", FP16, 1), (86,)),
    "1 row fp16, Q5_K": (lambda: product("Q5_K", FP16, 1), (86,)),
    "8 rows bf16, Q3_K": (lambda: product("Q3_K", BF16, 8), (86,)),
    "exact, 1 row fp16, Q4_K": (lambda: exact(product, "Q4_K", FP16, 1), FP16_GPUS),
    "exact, 1 row bf16, Q4_1": (lambda: exact(product, "Q4_1", BF16, 1), (80,)),
    "exact, 16 rows fp16, Q4_K": (lambda: exact(product, "Q4_K", FP16, 16), FP16_GPUS),
    "exact, 16 rows fp32, Q4_1": (lambda: exact(product, "Q4_1", FP32, 16), (75, 86)),
    "floats fp16, Q4_K": (lambda: floats("Q4_K", FP16), (75, 86)),
    "floats fp16, Q4_1": (lambda: floats("Q4_1", FP16), FP16_GPUS),
    "floats bf16, Q8_0": (lambda: floats("Q8_0", BF16), (80,)),
    "recurrent fp16, decodes": (lambda: recurrent(FP16, 1), FP16_GPUS),
    "recurrent bf16, prompts": (lambda: recurrent(BF16, 64), BF16_GPUS),
    "scan of prompts, DeltaNet": (lambda: scan(64, (16, 128), (32, 128), is_delta=True), (75,)),
    "scan of prompts, Mamba-2, 256 keys": (
        lambda: scan(64, (1, 256), (48, 64), is_delta=False),  # as in Falcon-H1
        (75, 86, 90, 120),
    ),
    "choice fp16": (lambda: choice(FP16), FP16_GPUS),
    "experts fp16, 16 pairs": (lambda: experts(FP16, 16), FP16_GPUS),
    "experts fp16, 64 pairs": (lambda: experts(FP16, 64), BF16_GPUS),
    "experts bf16, 64 pairs": (lambda: experts(BF16, 64), (80, 90)),
    "experts fp32, 16 pairs": (lambda: experts(FP32, 16), (75, 86)),
    "experts fp16, 1 pair, MXFP4": (lambda: experts(FP16, 1, "MXFP4"), (75, 90)),
    "experts fp16, 4 pairs, Q4_K": (lambda: experts(FP16, 4, "Q4_K"), (75, 90)),
    "exact, experts fp16, 16 pairs, Q4_K": (lambda: exact(experts, FP16, 16, "Q4_K"), (90,)),
    "host tiles fp16, Q4_K": (lambda: host_tiles("Q4_K", FP16), FP16_GPUS),
    "host tiles fp16, Q6_K": (lambda: host_tiles("Q6_K", FP16), (75, 86)),
    "host tiles fp16, Q8_0": (lambda: host_tiles("Q8_0", FP16), (75, 86)),
    "host tiles bf16, MXFP4": (lambda: host_tiles("MXFP4", BF16), (80, 90)),
}


def inspected(variant: str, capability: int, kernel: str, compiled: Any) -> Compiled:
    cubin = compiled.asm["cubin"]
    used, loop = usage(cubin), main_loop(cubin)
    names = compiled.src.fn.arg_names
    tile = compiled.src.constants[(names.index("TILE"),)] if kernel in ATTENTION else 32
    programs = programs_per_sm(
        capability, used.registers, compiled.metadata.shared, compiled.metadata.num_warps
    )
    assert programs is not None
    per_32 = [count(loop, kind) * 32 // tile for kind in (ANYTHING, WIDE_LOAD, SHARED_LOAD, BARRIER)]
    return Compiled(
        variant,
        capability,
        kernel,
        used.registers,
        used.spilled,
        compiled.metadata.shared,
        programs,
        per_32[0],
        per_1000_weights(
            kernel, compiled, len(loop), sum("NOP" not in text for _, text in instructions(cubin))
        ),
        *per_32[1:],
    )


def per_1000_weights(kernel: str, compiled: Any, loop: int, all_instructions: int) -> int:
    """Return the instructions that a thread executes for 1000 weights; its loop runs several times."""
    if kernel not in ("_multiply_integers", "_multiply_matrices"):
        return 0

    def constant(name: str) -> int:
        number: int = compiled.src.constants[(compiled.src.fn.arg_names.index(name),)]
        return number

    blocks_at_once = constant("STEP" if kernel == "_multiply_integers" else "WARPS")
    turns = COLUMNS // 32 / blocks_at_once
    weights = constant("ROWS") * COLUMNS / (32 * compiled.metadata.num_warps)
    count: int = round(1000 * (turns * loop + all_instructions - loop) / weights)
    return count


def compile_part(part: int, num_parts: int, only: str) -> Iterator[Compiled]:
    found: list[tuple[str, Any]] = []
    compile_instead_of_launching(found)
    everything = [
        (variant, launch, capability)
        for variant, (launch, capabilities) in VARIANTS.items()
        for capability in capabilities
        if re.search(only, variant)
    ]
    for variant, launch, capability in everything[part::num_parts]:
        driver.set_active(AbsentGPU(capability))
        found.clear()
        launch()
        for kernel, compiled in found:
            yield inspected(variant, capability, kernel, compiled)


if __name__ == "__main__":
    for result in compile_part(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]):
        print(json.dumps(asdict(result)), flush=True)
