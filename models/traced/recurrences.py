"""Recurrent layers in models of `transformers`: their calls in a graph, and the operators' modules.

The modeling code calls three functions by the same names in every family: a short convolution, the gated
delta rule and Mamba-2's scan. The last two are one operator here, see `models.recurrent.scan_state`.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from neo_desktop.models.operators import Operators
from neo_desktop.models.recurrent import RecurrentBatch
from neo_desktop.models.traced.capture import Calls, CannotCutError

ROW_DIMS = {"convolve": 2, "scan": 1}  # operator -> row dimension of its inputs and output
_SILU = ("silu", "swish")
_NORM_EPS = 1e-6  # of keys and queries, as in transformers


@torch.library.custom_op("neo_desktop::convolve", mutates_args=())
def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, has_silu: bool, index: int) -> Tensor:
    """Stand for a short convolution in a graph.

    Args:
        x: [1, channels, rows], as the result.
        weight: [channels, width]
        bias: [channels]
        has_silu: apply silu.
        index: of the state.
    """
    raise NotImplementedError("the stages compute it")


@convolve.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, has_silu: bool, index: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("neo_desktop::scan", mutates_args=())
def scan(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, index: int) -> Tensor:
    """Stand for a scan in a graph; see `models.recurrent.scan_state`.

    Args:
        q: [1, rows, key_heads, key_dim]; k is the same.
        v: [1, rows, heads, value_dim], as the result.
        decay: [1, rows, heads] float32; beta is the same.
        index: of the state.
    """
    raise NotImplementedError("the stages compute it")


@scan.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, index: int) -> Tensor:
    return torch.empty_like(v)


def _convolution(
    calls: Calls,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    if activation is not None and activation not in _SILU:
        raise CannotCutError(f"its short convolutions are activated by {activation}")
    channels, width = weight.shape
    calls.states.append((width - 1, channels))
    out: Tensor = convolve(x, weight, bias, activation is not None, len(calls.states) - 1)
    return out


def _delta_rule(
    calls: Calls,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *_: Any,
    use_qk_l2norm_in_kernel: bool = False,
    **__: Any,
) -> tuple[Tensor, None]:
    q, k = query.float(), key.float()
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + _NORM_EPS) for x in (q, k))
    q = q * query.shape[-1] ** -0.5
    out = _scanned(calls, q, k, value.float(), g.float(), beta.float())
    return out.to(query.dtype), None


def _state_space(
    calls: Calls,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 - names of transformers
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    z: Tensor | None = None,
    **_: Any,
) -> Tensor:
    if z is not None:
        raise CannotCutError("its Mamba layers have gates within the scan")
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = nn.functional.softplus(dt)
    dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1]).float()
    x = hidden_states.float()
    out = _scanned(calls, C.float(), B.float(), x * dt[..., None], A.float() * dt, None)
    return out if D is None else out + D[..., None] * x


def _scanned(calls: Calls, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None) -> Tensor:
    heads, key_heads = v.shape[2], k.shape[2]
    if heads % key_heads:
        raise CannotCutError(f"{heads} heads of its recurrent layers cannot share {key_heads} keys")
    calls.states.append((heads, k.shape[3], v.shape[3]))
    out: Tensor = scan(q, k, v, decay, beta, len(calls.states) - 1)
    return out


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _state_space,
}


@contextmanager
def recurrences_recorded(calls: Calls, model: nn.Module) -> Iterator[None]:
    """Record the model's recurrent layers within the context."""
    modules = {sys.modules[type(module).__module__] for module in model.modules()}
    kept = [
        (module, name, getattr(module, name))
        for module in modules
        for name in _FUNCTIONS
        if hasattr(module, name)
    ]
    for module, name, _ in kept:
        setattr(module, name, partial(_FUNCTIONS[name], calls))
    try:
        yield
    finally:
        for module, name, before in kept:
            setattr(module, name, before)


class Convolution(nn.Module):
    """A short convolution; see `convolve`."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, index: int, operators: Operators, *, has_silu: bool
    ) -> None:
        super().__init__()
        self._weight = weight.float().t().contiguous()
        self._bias = None if bias is None else bias.float()
        self._index, self._has_silu, self._operators = index, has_silu, operators

    def forward(self, x: Tensor, batch: RecurrentBatch) -> Tensor:
        rows = x[0].t().contiguous()
        out, state = torch.zeros_like(rows), batch.states[self._index]
        for spans in batch.passes:
            self._operators.short_convolution(
                rows, self._weight, self._bias, state, spans, out, has_silu=self._has_silu
            )
        return out.t()[None]


class Scan(nn.Module):
    """A scan; see `scan`."""

    def __init__(self, index: int, operators: Operators) -> None:
        super().__init__()
        self._index, self._operators = index, operators

    def forward(
        self, batch: RecurrentBatch, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None
    ) -> Tensor:
        q, k, v, decay = (x[0].contiguous() for x in (q, k, v, decay))
        weight = None if beta is None else beta[0].contiguous()
        out, state = torch.zeros_like(v), batch.states[self._index]
        for spans in batch.passes:
            self._operators.scan_state(q, k, v, decay, weight, state, spans, out)
        return out[None]
