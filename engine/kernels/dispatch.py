"""The kernels in Triton or torch, selected by the fallback level. The module implements `Operators`.

If a Triton kernel cannot be compiled or launched, the next level replaces it for good, and the log says so.
It also serves the failed call. Launches before the failure are harmless: both compute the same result.
"""

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any, ParamSpec

import torch
from torch import Tensor

from neo_desktop.engine.cuda.errors import is_lost, is_out_of_memory
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kernels import in_torch
from neo_desktop.engine.kernels.in_torch import num_pieces
from neo_desktop.engine.kernels.occupancy import PROGRAMS_ELSEWHERE, USUAL_PROGRAMS
from neo_desktop.models import operators
from neo_desktop.models.linear import grouped, unpack

MAX_PIECES_IN_GRAPH = 16  # most pieces per layer of torch's decode attention in a graph
P = ParamSpec("P")


def _kernel(mechanism: str, in_torch: Callable[P, None], module: str | None = None) -> Callable[P, None]:
    """Return a function that calls a kernel in Triton or torch, depending on the mechanism's fallback level.

    The Triton version has the same name and parameters as the torch version. Its module in `in_triton` is
    named like the mechanism, unless given. Raises RuntimeError if the GPU failed or ran out of memory.
    """

    @wraps(in_torch)
    def serve(*arguments: P.args, **named: P.kwargs) -> None:
        level = fallbacks.level(mechanism)
        if level != "torch":
            try:
                _in_triton(module or mechanism, in_torch.__name__)(*arguments, **named)
                return
            except Exception as error:  # compilers, linkers and drivers raise many types
                _give_up(mechanism, error)
            if fallbacks.level(mechanism) not in (level, "torch"):
                serve(*arguments, **named)
                return
        in_torch(*arguments, **named)

    return serve


# The torch versions document the functions. `write_rows` and `read_rows` need contiguous caches.
paged_decode = _kernel("paged_decode", in_torch.paged_decode)
rope = operators.rope  # no Triton kernel: on a GPU, all rows have slots and use `rope_append`
rope_append = _kernel("rope_append", operators.rope_append)
choose_tokens = operators.choose_tokens
add_rms_norm = _kernel("norm", operators.add_rms_norm)
silu_mul = _kernel("activation", operators.silu_mul)
write_rows = _kernel("row_copy", operators.write_rows)
read_rows = _kernel("row_copy", operators.read_rows)
choose_experts = _kernel("experts", operators.choose_experts)
multiply_experts = _kernel("experts", operators.multiply_experts)
scan_state = _kernel("recurrent", operators.scan_state)
short_convolution = _kernel("recurrent", operators.short_convolution)
multiply_packed = _kernel("quantised", grouped.multiply_packed)
dequantise = _kernel("quantised", grouped.dequantise)
unpack_quantised = _kernel("quantised", unpack.unpack_quantised, "host_tiles")


def programs_per_sm(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> int:
    """Return the number of decode-attention programs that fit on a multiprocessor at once.

    The number follows from the compiled kernel, or else from typical values for the GPU. The first call
    launches the kernel on empty input. Arguments and errors as in `paged_decode`.
    """
    if q.device.type != "cuda":  # Triton's interpreter
        return PROGRAMS_ELSEWHERE
    count: int | None = None
    if fallbacks.level("paged_decode") == "triton":
        try:
            count = _in_triton("paged_decode", "programs_per_sm")(q, k_cache, v_cache)
        except Exception as error:
            _give_up("paged_decode", error)
    major, minor = torch.cuda.get_device_capability(q.device)
    return count or USUAL_PROGRAMS.get(10 * major + minor, PROGRAMS_ELSEWHERE)


def fits_graph(requests: int, kv_heads: int, head_dim: int, max_tokens: int) -> bool:
    """Return True if decode attention at its fallback level has few enough launches per layer for a graph.

    Args:
        max_tokens: Most tokens that a request attends to.
    """
    if requests == 0 or fallbacks.level("paged_decode") == "triton":
        return True
    return num_pieces(requests, kv_heads, head_dim, max_tokens) <= MAX_PIECES_IN_GRAPH


def _give_up(mechanism: str, error: Exception) -> None:
    """Switch to the next level from now on if that can help against the error; otherwise raise the error."""
    if isinstance(error, AssertionError) or is_out_of_memory(error) or is_lost(error):
        raise error
    fallbacks.descend(mechanism, f"the Triton kernel cannot be used: {_first_line(error)}")


@cache
def _in_triton(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(f"{__package__}.in_triton.{module}"), name)
    return function


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
