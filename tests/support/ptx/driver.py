"""Lets Triton compile for an absent GPU, and launch on CPU tensors what it compiled.

Compilation ends with PTX in place of machine code, so `TRITON_CACHE_DIR` must be a separate folder.
"""

import struct
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from compile_kernels import AbsentGPU
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver

from .memory import GlobalMemory, Region
from .parse import Kernel, parse
from .run import run

MOST_SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 120: 99}  # KiB per program
FORMATS = {"f32": "f", "f64": "d", "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "s32": "i", "s64": "q"}

REGISTERS = 64  # per thread; only ptxas knows them

Change = Callable[[Kernel], Kernel]
Submit = Callable[[str, Callable[[], object]], object]


class ImitatedGPU(AbsentGPU):
    """A GPU that executes PTX; its own `utils`, as Triton names what loads kernels.

    Args:
        capability: 86 means 8.6.
        seed: draws the order of programs and warps.
    """

    def __init__(self, capability: int, seed: int = 0) -> None:
        super().__init__(capability)
        self.utils, self.seed = self, seed
        self.launches: Counter[str] = Counter()  # kernel → number
        self.executed: defaultdict[str, set[int]] = defaultdict(set)  # kernel → places of instructions
        self.change: Change = lambda kernel: kernel  # spoils kernels before they are executed
        self.submit: Submit = lambda name, work: work()  # puts a launch on a stream, if there are streams

    def install(self) -> None:
        """Make all later launches of this process run here."""
        CUDABackend.make_cubin = lambda self, source, metadata, options, capability: source.encode()
        driver.set_active(self)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": MOST_SHARED[self._capability] * 1024}

    def load_binary(self, name: str, ptx: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Return module, function, registers, spilled bytes and most threads, as Triton wants."""
        kernel = parse(ptx.decode())
        return kernel, kernel, REGISTERS, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Return a function that launches a kernel, as Triton calls it."""
        kinds = dict(source.signature)
        scratch = [0, 0]  # addresses that Triton adds

        def launch(x: int, y: int, z: int, stream: int, function: Kernel, *rest: Any) -> None:
            kernel, given = self.change(function), rest[4:]
            named = zip(kinds.items(), given, strict=True)
            arguments = [(name, value) for (name, kind), value in named if kind != "constexpr"]
            regions, numbers = [], []
            for name, value in arguments:
                if isinstance(value, torch.Tensor):
                    storage = value.untyped_storage()
                    if len(storage):
                        regions.append(Region(storage.data_ptr(), len(storage), name))
                numbers.append(value.data_ptr() if isinstance(value, torch.Tensor) else value)
            assert len(kernel.parameters) <= len(numbers) + len(scratch), kernel.name
            parameters = {
                name: struct.pack("<" + FORMATS[kind], number)
                for (name, kind), number in zip(kernel.parameters.items(), numbers + scratch, strict=False)
            }
            memory = GlobalMemory(regions)

            def execute() -> None:
                executed = run(kernel, (x, y, z), parameters, memory, metadata.shared, self.seed)
                self.executed[kernel.name] |= executed

            self.launches[kernel.name] += 1
            self.submit(kernel.name, execute)

        return launch
