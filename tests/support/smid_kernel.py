"""A kernel that records the multiprocessors it runs on."""

import torch
import triton
from torch import Tensor
from triton import language as tl

PROGRAMS = 8192  # far more than any GPU runs at a time
SPINS = 2000  # long enough that the next program starts on another multiprocessor


@triton.jit
def _which_sm(sms, spun, spins):
    program = tl.program_id(0)
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    value = sm
    for _ in range(spins):
        value = value * 1664525 + 1013904223
    tl.store(spun + program, value)
    tl.store(sms + program, sm)


def launch(sms: Tensor, spun: Tensor) -> None:
    """Launch the kernel: it fills `sms` [PROGRAMS] int32; `spun` [PROGRAMS] int32 only keeps it busy."""
    _which_sm[(PROGRAMS,)](sms, spun, SPINS)


def buffers(device: str = "cuda") -> tuple[Tensor, Tensor]:
    """Return the arguments of `launch`."""
    empty = torch.full((PROGRAMS,), -1, dtype=torch.int32, device=device)
    return empty, torch.empty_like(empty)


def multiprocessors() -> set[int]:
    """Return the multiprocessors of a launch on the current stream."""
    sms, spun = buffers()
    launch(sms, spun)
    return set(sms.tolist())
