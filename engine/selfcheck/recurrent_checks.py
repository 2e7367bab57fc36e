"""Checks of recurrent layers on the GPU, at each fallback level, against float64."""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize, silu

from neo_desktop.engine.doctor.outcome import Figures
from neo_desktop.engine.kernels.dispatch import scan_state, short_convolution
from neo_desktop.engine.selfcheck.kv_checks import error_of
from neo_desktop.engine.selfcheck.rig import Rig
from neo_desktop.models.recurrent import Spans

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 64, 48
CHANNELS, WIDTH = 200, 4
SPANS = ((0, 5, 0, 3), (5, 6, 2, 2), (6, 40, -1, 1))  # {first, end, source, target}
SLOTS = 5


def check_recurrent(rig: Rig) -> Figures:
    """Check scans with and without the delta rule, and short convolutions: outputs and states."""
    spans = Spans(torch.tensor(SPANS, dtype=torch.int32, device=rig.device), 34)
    errors = [*_scans(rig, spans, has_beta=True), *_scans(rig, spans, has_beta=False)]
    errors += _convolutions(rig, spans)
    rows, state = SPANS[-1][1], torch.zeros(SLOTS, HEADS, KEY_DIM, VALUE_DIM, device=rig.device)
    q = torch.zeros(rows, KEY_HEADS, KEY_DIM, dtype=rig.dtype, device=rig.device)
    v = torch.zeros(rows, HEADS, VALUE_DIM, dtype=rig.dtype, device=rig.device)
    decay = torch.zeros(rows, HEADS, device=rig.device)
    work = partial(scan_state, q, q, v, decay, decay, state, spans, v.clone())
    return rig.judge(errors, work, 2 * state[0].nbytes * len(SPANS))


def _scans(rig: Rig, spans: Spans, *, has_beta: bool) -> list[float]:
    rows = SPANS[-1][1]
    q, k = (normalize(torch.randn(rows, KEY_HEADS, KEY_DIM), dim=-1).to(rig.dtype) for _ in range(2))
    v, decay = torch.randn(rows, HEADS, VALUE_DIM).to(rig.dtype), -torch.rand(rows, HEADS)
    beta = torch.rand(rows, HEADS) if has_beta else None
    state = torch.randn(SLOTS, HEADS, KEY_DIM, VALUE_DIM)
    out, after = torch.empty_like(v, device=rig.device), state.to(rig.device, copy=True)
    there = q.to(rig.device), k.to(rig.device), v.to(rig.device), decay.to(rig.device)
    scan_state(*there, None if beta is None else beta.to(rig.device), after, spans, out)
    keys, queries = (x.double().repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, q))
    expected, states = torch.zeros(v.shape, dtype=torch.float64), state.double()
    for first, end, source, target in SPANS:
        now = states[source].clone() if source >= 0 else torch.zeros_like(states[0])
        for token in range(first, end):
            now *= decay[token].double().exp()[:, None, None]
            delta = v[token].double()
            if beta is not None:
                known = torch.einsum("hkv,hk->hv", now, keys[token])
                delta = (delta - known) * beta[token].double()[:, None]
            now += keys[token][:, :, None] * delta[:, None]
            expected[token] = torch.einsum("hkv,hk->hv", now, queries[token])
        states[target] = now
    return [error_of(out.cpu(), expected), *_of_states(after, states)]


def _convolutions(rig: Rig, spans: Spans) -> list[float]:
    rows = SPANS[-1][1]
    x, weight, bias = (
        torch.randn(rows, CHANNELS).to(rig.dtype),
        torch.randn(WIDTH, CHANNELS),
        torch.randn(CHANNELS),
    )
    state = torch.randn(SLOTS, WIDTH - 1, CHANNELS)
    out, after = torch.empty_like(x, device=rig.device), state.to(rig.device, copy=True)
    there = x.to(rig.device), weight.to(rig.device), bias.to(rig.device)
    short_convolution(*there, after, spans, out, has_silu=True)
    expected, states = torch.zeros(x.shape, dtype=torch.float64), state.double()
    for first, end, source, target in SPANS:
        past = states[source] if source >= 0 else torch.zeros_like(states[0])
        inputs = torch.cat((past, x[first:end].double()))
        sums = sum(weight[tap].double() * inputs[tap : tap + end - first] for tap in range(WIDTH))
        expected[first:end] = silu(sums + bias.double())
        states[target] = inputs[end - first :]
    return [error_of(out.cpu(), expected), *_of_states(after, states)]


def _of_states(after: Tensor, expected: Tensor) -> list[float]:
    """Return the errors of the states, without the last slot, which is scratch."""
    return [error_of(found.cpu(), exact) for found, exact in zip(after[:-1], expected[:-1], strict=True)]
