"""Recurrent layers in models of `transformers`: their calls in a graph, and the operators' modules.

The modeling code calls three functions by the same names in every family: a short convolution, the gated
delta rule and Mamba-2's scan. The last two are one operator here, see `models.recurrent.scan_state`.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from neo_desktop.models.operators import Operators
from neo_desktop.models.recurrent import RecurrentBatch
from neo_desktop.models.traced.capture import Calls, CannotCutError
from neo_desktop.models.traced.sizes import Change, stand_in

ROW_DIMS = {"convolve": 2, "scan": 1}  # operator -> row dimension of its inputs and output
_SILU = ("silu", "swish")
_NORM_EPS = 1e-6  # of keys and queries, as in transformers


# A short convolution: x [1, channels, rows], weight [channels, width], bias [channels] -> as x.
convolve = stand_in(
    "convolve",
    "(Tensor x, Tensor weight, Tensor? bias, bool has_silu, int index) -> Tensor",
    lambda x, weight, bias, has_silu, index: torch.empty_like(x),
)
# A scan, see `models.recurrent.scan_state`: q and k [1, rows, key_heads, key_dim], v [1, rows, heads,
# value_dim], decay and beta [1, rows, heads] float32 -> as v. Without the delta rule, beta is a factor on v.
scan = stand_in(
    "scan",
    "(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, bool is_delta, int index) -> Tensor",
    lambda q, k, v, decay, beta, is_delta, index: torch.empty_like(v),
)


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
    q, k, dim = query.float(), key.float(), query.shape[-1]
    if use_qk_l2norm_in_kernel:
        q, k = (
            nn.functional.rms_norm(x, (dim,), eps=_NORM_EPS / dim) * dim**-0.5  # of length 1
            for x in (q, k)
        )
    q = q * dim**-0.5
    out = _scanned(calls, q, k, value.float(), g.float(), beta.float(), is_delta=True)
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
    if tuple(dt_limit) != (0.0, float("inf")) or not dt_softplus:
        dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1])
    x, dt = hidden_states.float(), dt.float()
    out = _scanned(calls, C.float(), B.float(), x, A.float() * dt, dt, is_delta=False)
    return out if D is None else out + D[..., None] * x


def _scanned(
    calls: Calls, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, *, is_delta: bool
) -> Tensor:
    heads, key_heads = v.shape[2], k.shape[2]
    if heads % key_heads:
        raise CannotCutError(f"{heads} heads of its recurrent layers cannot share {key_heads} keys")
    calls.states.append((heads, k.shape[3], v.shape[3]))
    out: Tensor = scan(q, k, v, decay, beta, is_delta, len(calls.states) - 1)
    return out


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _state_space,
}


def recurrences_recorded(calls: Calls, model: nn.Module) -> Iterator[Change]:
    """Yield the changes that record the model's recurrent layers."""
    for module in {sys.modules[type(module).__module__] for module in model.modules()}:
        for name, record in _FUNCTIONS.items():
            if hasattr(module, name):
                yield module, name, partial(record, calls)


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
        out = torch.zeros_like(rows)
        self.apply_rows(batch, out, rows)
        return out.t()[None]

    def apply_rows(self, batch: RecurrentBatch, out: Tensor, x: Tensor) -> None:
        """Write the convolution of x [rows, channels] to `out`, for rows in spans."""
        for spans in batch.passes:
            self._operators.short_convolution(
                x, self._weight, self._bias, batch.states[self._index], spans, out, has_silu=self._has_silu
            )


class Scan(nn.Module):
    """A scan; see `scan`."""

    def __init__(self, index: int, operators: Operators, *, is_delta: bool) -> None:
        super().__init__()
        self._index, self._is_delta, self._operators = index, is_delta, operators

    def forward(
        self, batch: RecurrentBatch, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
    ) -> Tensor:
        q, k, v, decay, beta = (x[0].contiguous() for x in (q, k, v, decay, beta))
        out = torch.zeros_like(v)
        self.apply_rows(batch, out, q, k, v, decay, beta)
        return out[None]

    def apply_rows(
        self,
        batch: RecurrentBatch,
        out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
    ) -> None:
        """Scan each span of the batch and write its rows to `out` [rows, heads, value_dim]."""
        state = batch.states[self._index]
        for spans in batch.passes:
            self._operators.scan_state(q, k, v, decay, beta, state, spans, out, is_delta=self._is_delta)
