"""The kernels as others call them: by Triton or by torch, as the ladder says. The module is `Operators`, too.

A Triton kernel that cannot be compiled or launched is given up for torch's operators, with a line in the log,
and the call is served. What had been launched would have given the same.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from neo_desktop.engine.cuda.errors import is_lost, is_out_of_memory
from neo_desktop.engine.kernels import in_torch
from neo_desktop.engine.kernels.in_torch import num_pieces
from neo_desktop.engine.kernels.occupancy import PROGRAMS_ELSEWHERE, usual_programs
from neo_desktop.engine.ladder import ladder
from neo_desktop.models import operators

MAX_PIECES_IN_GRAPH = 16  # of decode attention by torch, in each layer


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    out: Tensor,
    partial_out: Tensor,
    partial_lse: Tensor,
    scale: float,
    window: int | None,
) -> None:
    """Attend from one new token per request to its whole context, whose KV is in the cache already.

    Requests with a context of 0 tokens get zeros: the padding of a batch. What lies beyond a context, in
    tables and in the cache, does not matter.

    Args:
        q: [requests, heads, head_dim], fp16, fp32 or (from 8.0 on) bf16; the heads of a token contiguous.
        k_cache: [num_blocks, block_size, kv_heads, head_dim], of q's dtype; v_cache likewise, with the
            same strides. Any will do with which the dimensions of a head are contiguous.
        block_tables: [requests, max_blocks] int32, contiguous.
        context_lens: [requests] int32, the new token included.
        out: as q.
        partial_out: [requests, heads, num_splits, head_dim] fp32, contiguous: workspace, with any content;
            for one split [0, heads, 1, head_dim] will do.
        partial_lse: [requests, heads, num_splits] fp32, contiguous: likewise.
        scale: the factor on q·k.
        window: how many of the last tokens are attended to; None: all.
    """
    _serve(
        "paged_decode",
        in_torch.paged_decode,
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        out,
        partial_out,
        partial_lse,
        scale,
        window,
    )


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
    if ladder.rung("paged_decode") == "triton":
        try:
            found = _in_triton("paged_decode", "programs_per_sm")(q, k_cache, v_cache)
        except Exception as error:
            _give_up("paged_decode", error)
    major, minor = torch.cuda.get_device_capability(q.device)
    return found or usual_programs(10 * major + minor)


def rope(qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, qk_norm: Tensor | None, eps: float) -> None:
    """See `models.operators.rope`; there is no kernel for it, since on a GPU all rows have slots."""
    operators.rope(qkv, cos, sin, kv_heads, qk_norm, eps)


def rope_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qk_norm: Tensor | None,
    eps: float,
) -> None:
    """See `models.operators.rope_append`."""
    _serve("rope_append", operators.rope_append, qkv, cos, sin, slots, k_cache, v_cache, qk_norm, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See `models.operators.add_rms_norm`."""
    _serve("norm", operators.add_rms_norm, x, residual, weight, eps, out)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """See `models.operators.silu_mul`."""
    _serve("activation", operators.silu_mul, gate_up, out)


def write_rows(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """See `models.operators.write_rows`; here the caches are contiguous, and slots int64."""
    _serve("row_copy", operators.write_rows, k, v, k_cache, v_cache, slots)


def read_rows(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """See `models.operators.read_rows`."""
    _serve("row_copy", operators.read_rows, k, v, k_cache, v_cache, slots)


def fits_graph(requests: int, kv_heads: int, head_dim: int, max_tokens: int) -> bool:
    """Whether decode attention of a layer is few enough launches, on its present rung, to be kept in a graph.

    Args:
        requests: in the batch, padding included.
        kv_heads: of the model.
        head_dim: likewise.
        max_tokens: that a request may attend to.
    """
    if requests == 0 or ladder.rung("paged_decode") == "triton":
        return True
    return num_pieces(requests, kv_heads, head_dim, max_tokens) <= MAX_PIECES_IN_GRAPH


def _serve(mechanism: str, in_torch: Callable[..., None], *arguments: object) -> None:
    """Call a kernel of the mechanism: Triton's is called like torch's, in a module called like the mechanism.

    Raises:
        RuntimeError: the GPU failed, or has no memory left.
    """
    if ladder.rung(mechanism) == "triton":
        try:
            _in_triton(mechanism, in_torch.__name__)(*arguments)
            return
        except Exception as error:  # compilers, linkers and drivers: each fails in ways of its own
            _give_up(mechanism, error)
    in_torch(*arguments)


def _give_up(mechanism: str, error: Exception) -> None:
    """Let torch serve from now on, if that would help against the error; else raise it."""
    if isinstance(error, AssertionError) or is_out_of_memory(error) or is_lost(error):
        raise error
    ladder.limit(mechanism, "torch", f"the Triton kernel cannot be used: {_first_line(error)}")


@cache
def _in_triton(module: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(import_module(f"{__package__}.in_triton.{module}"), name)
    return found


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
