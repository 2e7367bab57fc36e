"""Spoils compiled kernels in many ways, one at a time, and executes them; a program.

    python -m ptx.mutants CAPABILITY CASE [SEED]    CASE: a key of `CASES`

It removes executed barriers of the case's kernels. It makes waits for asynchronous copies one group shorter.
It shifts addresses by the size of the access. The output has a JSON line per mutant:
the kernel, the instruction, and how it was noticed, or null. The first line has the unchanged kernels.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from paged_case import make_case
from torch import Tensor

from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kernels.in_triton.norm import add_rms_norm
from neo_desktop.engine.kernels.in_triton.paged_decode import paged_decode
from neo_desktop.engine.kernels.in_triton.quantised import multiply_packed
from neo_desktop.models import operators
from neo_desktop.models.linear import grouped
from neo_desktop.models.linear.grouped import Grouped

from .arithmetic import split
from .driver import ImitatedGPU
from .memory import KernelError
from .numbers import FORMATS
from .parse import Address, Instruction, Kernel

ENOUGH = 5e-3  # relative error that is too much; the unchanged kernels make less
NO_BARRIER = Instruction(("bar", "warp", "sync"), ("-1",))


def norm() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(2, 640).half(), torch.randn(2, 640).half(), torch.rand(640).half()
    expected, found = torch.empty_like(x), torch.empty_like(x)
    operators.add_rms_norm(x, residual.clone(), weight, 1e-5, expected)
    add_rms_norm(x, residual, weight, 1e-5, found)
    return found, expected


def product(level: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    weight = Grouped("Q4_K", 64, 1024, torch.device("cpu"))
    weight.fill(torch.Generator().manual_seed(0))
    exact, x = torch.empty(64, 1024), torch.randn(16, 1024).half()
    grouped.dequantise(weight, 0, exact)
    found = torch.full((16, 64), torch.nan, dtype=torch.float16)
    with fallbacks.at_levels({"quantised": level}):
        multiply_packed(x, [weight], None, found)
    rounded = x if level == "exact" else grouped.rounded(x)
    return found, rounded.double() @ exact.double().T


def attention() -> tuple[Tensor, Tensor]:
    case = make_case([300], kv_heads=1, group=4, head_dim=64, dtype=torch.float16)
    out = torch.full_like(case.q, torch.nan)
    nothing = torch.empty(0, 4, 1, 64), torch.empty(0, 4, 1)
    caches = case.k_cache.transpose(1, 2), case.v_cache.transpose(1, 2)
    paged_decode(case.q, *caches, case.block_tables, case.context_lens, out, *nothing, case.scale, None)
    return out, case.reference()


CASES: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "norm": norm,
    "attention": attention,
    "integers": lambda: product("integers"),
    "tiles": lambda: product("exact"),
}


def mutants_of(kernel: Kernel, executed: set[int]) -> Iterator[tuple[int, Instruction]]:
    """Return executed places in the code, and what to put there."""
    for place in sorted(executed):
        instruction = kernel.code[place]
        name, types = split(instruction)
        if name == "bar":
            yield place, NO_BARRIER
        elif name == "cp.async.wait_group":
            (count,) = instruction.operands
            yield place, replace(instruction, operands=(str(int(str(count), 0) + 1),))
        elif name.startswith(("ld.global", "ld.shared", "st.", "cp.async.c", "ldmatrix", "stmatrix")):
            if name == "cp.async.commit_group":
                continue
            size = _bytes(instruction, types)
            shifted = tuple(
                Address(each.base, each.offset + size) if isinstance(each, Address) else each
                for each in instruction.operands
            )
            yield place, replace(instruction, operands=shifted)


def _bytes(instruction: Instruction, types: list[str]) -> int:
    """Return the bytes that an instruction moves per thread, or per row of a matrix."""
    if "matrix" in instruction.parts[0]:
        return 16
    if instruction.parts[0] == "cp":
        return int(str(instruction.operands[2]), 0)
    count = next((int(part[1]) for part in instruction.parts if part in ("v2", "v4")), 1)
    return count * FORMATS[types[0]].bits // 8


def error(numbers: tuple[Tensor, Tensor]) -> float:
    found, expected = (each.double() for each in numbers)
    return float((found - expected).norm() / expected.norm())


def noticed(run: Callable[[], tuple[Tensor, Tensor]]) -> str | None:
    try:
        wrong = error(run())
    except KernelError as failure:
        return str(failure).split(": ")[1]
    return None if wrong < ENOUGH else f"a relative error of {wrong:.1g}"


def _put(changed: Kernel, kernel: Kernel) -> Kernel:
    return changed if kernel.name == changed.name else kernel


def main(capability: int, case: str, seed: int = 0) -> None:
    gpu = ImitatedGPU(capability, seed)
    gpu.install()
    kernels: dict[str, Kernel] = {}

    def remember(kernel: Kernel) -> Kernel:
        return kernels.setdefault(kernel.name, kernel)

    gpu.change = remember
    print(json.dumps({"kernel": None, "instruction": None, "noticed": noticed(CASES[case])}), flush=True)
    executed = {name: set(places) for name, places in gpu.executed.items()}
    for name, kernel in kernels.items():
        for place, mutant in mutants_of(kernel, executed[name]):
            code = [*kernel.code[:place], mutant, *kernel.code[place + 1 :]]
            changed = replace(kernel, code=code)
            gpu.change = partial(_put, changed)
            line = {"kernel": name, "instruction": str(kernel.code[place]), "noticed": noticed(CASES[case])}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
