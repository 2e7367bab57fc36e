"""Triton kernels on the CPU: the first launch per variant in Triton's interpreter, later ones by torch.

The interpreter takes a millisecond for each program of a launch. So it runs just enough to check the
launch arguments; `tests/kernels` checks the kernels' results against the operators.
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor
from triton.runtime.interpreter import GridExecutor

interpret = GridExecutor.__call__

_interpreted: set[object] = set()  # variants
_merged: set[int] = set()  # addresses of partial results left unwritten, because `out` has the whole


@cache
def _by_torch() -> Mapping[str, Callable[..., None]]:
    # Imported late: neo_desktop itself may import torch, which imports this module.
    in_torch = import_module("neo_desktop.engine.kernels.in_torch")
    in_triton = import_module("neo_desktop.engine.kernels.in_triton.paged_decode")
    operators = import_module("neo_desktop.models.operators")
    experts = import_module("neo_desktop.models.expert_operators")

    def named(module: str, kernel: str) -> str:
        assert hasattr(import_module(f"neo_desktop.engine.kernels.in_triton.{module}"), kernel), kernel
        return kernel

    def gated(gate_up: Tensor, out: Tensor, alpha: float, limit: float, **constants: Any) -> None:
        is_clamped = constants["HOW"] == "clamped"
        how = experts.ClampedGate(alpha, limit) if is_clamped else constants["HOW"]
        out.copy_(experts.gated(*gate_up.chunk(2, -1), how))

    def attend(*args: Any, **constants: Any) -> None:
        sinks, scale, window = args[8:11]
        softcap = constants["SOFTCAP"]
        _merged.add(_partial_lse(args))
        in_torch.paged_decode(
            *args[:8],
            scale / in_triton.LOG2_E,
            None if window == in_triton.EVERYTHING else window,
            sinks if constants["HAS_SINKS"] else None,
            softcap / in_triton.LOG2_E if softcap > 0 else None,
        )

    def copy_rows(*args: Any, **constants: object) -> None:
        (operators.write_rows if constants["WRITE"] else operators.read_rows)(*args[:5])

    return {
        named("norm", "_add_rms_norm"): lambda *args, **_: operators.add_rms_norm(*args[:5]),
        named("activation", "_gated"): gated,
        named("rope_append", "_rope_append"): lambda *args, **_: operators.rope_append(*args[:8]),
        named("row_copy", "_copy_rows"): copy_rows,
        named("paged_decode", "_attend"): attend,
    }


def compute_kernel(executor: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Compute a kernel launch; its tensors are views of memory that the CPU sees."""
    name = executor.fn.__name__
    variant = name, *((key, named[key]) for key in sorted(named) if key in executor.constexprs)
    if name in _by_torch() and variant in _interpreted:
        _by_torch()[name](*positional, **named)
        return
    if name == "_merge" and positional[1].data_ptr() in _merged:
        return
    if name == "_attend":
        _merged.discard(_partial_lse(positional))
    _interpreted.add(variant)
    interpret(executor, *positional, **named)


def _partial_lse(args: tuple[Any, ...]) -> int:
    lse = args[7]
    assert isinstance(lse, Tensor)
    return lse.data_ptr()
