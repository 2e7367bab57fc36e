"""Reads machine code of NVIDIA's GPUs from `cuobjdump -sass`."""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+([^;/]+);")
JUMP = re.compile(r"\bBRA\b.*\b0x([0-9a-f]+)")
WIDE_LOAD = re.compile(r"\b(LDG|LDGSTS)\.\S*128")
SHARED_LOAD = re.compile(r"\b(LDS|LDSM)\b")
BARRIER = re.compile(r"\bBAR\b")


@dataclass(frozen=True, slots=True)
class Usage:
    """Registers and local memory of a kernel."""

    registers: int
    spilled: int  # bytes per thread, in local memory


def usage(cubin: bytes) -> Usage:
    text = _dump(cubin, "-res-usage")
    numbers = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return Usage(numbers["REG"], numbers["STACK"] + numbers["LOCAL"])


def instructions(cubin: bytes) -> Sequence[tuple[int, str]]:
    """Return the kernel's instructions with their addresses."""
    code = [(int(address, 16), text) for address, text in INSTRUCTION.findall(_dump(cubin, "-sass"))]
    assert code, "cuobjdump's output is not what it was"
    return code


def main_loop(cubin: bytes) -> Sequence[str]:
    """Return the instructions of the longest loop, or of the whole kernel if it has no loop."""
    code = instructions(cubin)
    loops = [
        (int(jump[1], 16), address)
        for address, text in code
        if (jump := JUMP.search(text)) and int(jump[1], 16) < address
    ]
    if not loops:
        return [text for _, text in code]
    first, last = max(loops, key=lambda loop: loop[1] - loop[0])
    return [text for address, text in code if first <= address <= last]


def count(instructions: Sequence[str], kind: re.Pattern[str]) -> int:
    return sum(1 for text in instructions if kind.search(text))


@cache
def _dump(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([CUOBJDUMP, what, file.name], capture_output=True, text=True, check=True).stdout
