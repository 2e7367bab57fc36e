"""The kernels, by Triton or by torch, as the fallback level says. The module serves as `Operators`.

A Triton kernel that cannot be compiled or launched is given up for torch's operators, with a line in the log,
and the call is served. What had been launched would have given the same.
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
from neo_desktop.engine.kernels.occupancy import PROGRAMS_ELSEWHERE, usual_programs
from neo_desktop.models import operators
from neo_desktop.models.linear import grouped, unpack

MAX_PIECES_IN_GRAPH = 16  # of decode attention by torch, in each layer
P = ParamSpec("P")


def _kernel(mechanism: str, in_torch: Callable[P, None], module: str | None = None) -> Callable[P, None]:
    """Return what calls a kernel: Triton's is called like torch's, its module like the mechanism or as given.

    It raises RuntimeError if the GPU failed, or has no memory left.
    """

    @wraps(in_torch)
    def serve(*arguments: P.args, **named: P.kwargs) -> None:
        if fallbacks.level(mechanism) == "triton":
            try:
                _in_triton(module or mechanism, in_torch.__name__)(*arguments, **named)
                return
            except Exception as error:  # compilers, linkers and drivers: each fails in ways of its own
                _give_up(mechanism, error)
        in_torch(*arguments, **named)

    return serve


# What they do is said where torch does it. For rows of KV, caches are contiguous.
paged_decode = _kernel("paged_decode", in_torch.paged_decode)
rope = operators.rope  # there is no kernel for it: on a GPU all rows have slots
rope_append = _kernel("rope_append", operators.rope_append)
add_rms_norm = _kernel("norm", operators.add_rms_norm)
silu_mul = _kernel("activation", operators.silu_mul)
write_rows = _kernel("row_copy", operators.write_rows)
read_rows = _kernel("row_copy", operators.read_rows)
choose_experts = _kernel("experts", operators.choose_experts)
multiply_experts = _kernel("experts", operators.multiply_experts)
multiply_few = _kernel("quantised", grouped.multiply_few)
dequantise = _kernel("quantised", grouped.dequantise)
unpack_quantised = _kernel("quantised", unpack.unpack_quantised, "host_tiles")


def programs_per_sm(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> int:
    """Return how many programs of decode attention a multiprocessor holds at once, for such arguments.

    From what the compiler made of the kernel; where that is not known, what is usual for such a GPU. At first
    this launches the kernel, with nothing to do. For the arguments see `paged_decode`.

    Raises:
        RuntimeError: the GPU failed, or has no memory left.
    """
    if q.device.type != "cuda":  # Triton's interpreter
        return PROGRAMS_ELSEWHERE
    found: int | None = None
    if fallbacks.level("paged_decode") == "triton":
        try:
            found = _in_triton("paged_decode", "programs_per_sm")(q, k_cache, v_cache)
        except Exception as error:
            _give_up("paged_decode", error)
    major, minor = torch.cuda.get_device_capability(q.device)
    return found or usual_programs(10 * major + minor)


def fits_graph(requests: int, kv_heads: int, head_dim: int, max_tokens: int) -> bool:
    """Return True if a layer of decode attention has few enough launches, on its present level, for a graph.

    Args:
        requests: in the batch, padding included.
        kv_heads: of the model.
        head_dim: likewise.
        max_tokens: that a request may attend to.
    """
    if requests == 0 or fallbacks.level("paged_decode") == "triton":
        return True
    return num_pieces(requests, kv_heads, head_dim, max_tokens) <= MAX_PIECES_IN_GRAPH


def _give_up(mechanism: str, error: Exception) -> None:
    """Let torch serve from now on, if that would help against the error; else raise it."""
    if isinstance(error, AssertionError) or is_out_of_memory(error) or is_lost(error):
        raise error
    fallbacks.limit(mechanism, "torch", f"the Triton kernel cannot be used: {_first_line(error)}")


@cache
def _in_triton(module: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(import_module(f"{__package__}.in_triton.{module}"), name)
    return found


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
