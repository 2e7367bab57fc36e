"""A kernel that tells which multiprocessors it ran on."""

import torch
import triton
from torch import Tensor
from triton import language as tl

PROGRAMS = 8192  # far more than any GPU runs at a time
SPINS = 2000  # so that a program is not over before the next one has begun elsewhere


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
    """Put on the current stream what fills `sms` [PROGRAMS] int32; `spun`, likewise, is of no use."""
    _which_sm[(PROGRAMS,)](sms, spun, SPINS)


def buffers(device: str = "cuda") -> tuple[Tensor, Tensor]:
    """What `launch` takes."""
    empty = torch.full((PROGRAMS,), -1, dtype=torch.int32, device=device)
    return empty, torch.empty_like(empty)


def multiprocessors() -> set[int]:
    """Launch it on the current stream, and return where its programs ran."""
    sms, spun = buffers()
    launch(sms, spun)
    return set(sms.tolist())
