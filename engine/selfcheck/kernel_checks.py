"""Checks of every GPU kernel at every fallback level, against float64, with the model's shapes.

References are computed on the CPU, because the GPU is under test.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from neo_desktop.engine.doctor.outcome import CheckError, Figures
from neo_desktop.engine.execute.prefill import Prefill, groups_of
from neo_desktop.engine.fallbacks import MECHANISMS, fallbacks
from neo_desktop.engine.kernels.dispatch import (
    add_rms_norm,
    dequantise,
    multiply_packed,
    rope_append,
    silu_mul,
    unpack_quantised,
)
from neo_desktop.engine.kv.device_layer import DeviceLayer
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.selfcheck.check import Check
from neo_desktop.engine.selfcheck.expert_checks import check_experts
from neo_desktop.engine.selfcheck.kv_checks import capped, check_decode, check_rows, error_of, weights_of
from neo_desktop.engine.selfcheck.recurrent_checks import check_recurrent
from neo_desktop.engine.selfcheck.rig import Rig, on_levels
from neo_desktop.models.attention import AttentionSpec
from neo_desktop.models.linear import grouped, unpack
from neo_desktop.models.linear.codes import UNIT
from neo_desktop.models.linear.grouped import MOST_ROWS, Grouped
from neo_desktop.models.linear.quantised import packed_bytes

DEADLINE_S = 90.0  # the first launch compiles, possibly on a slow computer
ROWS = (1, 3, 32, 250)
# Types of quantised weights, one per coding scheme -> rows of inputs.
KINDS = {"Q8_0": (1, 8), "Q4_1": (3,), "Q4_K": (1, MOST_ROWS), "Q6_K": (3,), "MXFP4": (2,)}
QUANTISED_ROWS = 80  # rows of a matrix: a full tile and a partial one
CHUNKS = ((0, 1), (0, 40), (130, 7), (300, 200))  # (tokens before, tokens) of prompt chunks

Kernel = Callable[[Rig], Figures]


def kernel_checks(rig: Rig) -> Iterator[Check]:
    """Yield the checks of every kernel at every level, the highest first."""
    kernels: dict[str, Kernel] = {
        "row_copy": check_copies,
        "paged_decode": lambda rig: check_decode(rig, rig.dtype, kind=DeviceLayer),
        "rope_append": check_rope,
        "norm": check_norm,
        "activation": check_activation,
        "quantised": check_quantised,
        "experts": check_experts,
        "recurrent": check_recurrent,
        "prompt_attention": check_prompts,
    }
    for name, check in kernels.items():
        # Errors in other kernels that the check needs must not count against this kernel.
        others = {"paged_decode": "torch"} if name == "row_copy" else {}
        for level in MECHANISMS[name].levels:
            yield Check(
                f"{name}-{level.name}",
                f"{MECHANISMS[name].title}: {level.what}",
                name,
                level.name,
                DEADLINE_S,
                partial(_on_levels, rig, check, {**others, name: level.name}),
            )


def _on_levels(rig: Rig, check: Kernel, levels: dict[str, str]) -> Figures:
    with on_levels(levels), torch.inference_mode():
        return check(rig)


def check_copies(rig: Rig) -> Figures:
    """Check that rows read from slots equal the rows stored."""
    return check_rows(rig, rig.dtype, kind=DeviceLayer)


def check_norm(rig: Rig) -> Figures:
    """Check the sum of x and the residual, and its norm."""
    hidden, eps = rig.config.hidden_size, rig.config.rms_norm_eps
    weight = rig.random(hidden).abs() + 0.1
    errors: list[float] = []
    for rows in ROWS:
        x, residual = rig.random(rows, hidden), rig.random(rows, hidden)
        total = (x.float() + residual.float()).to(rig.dtype)
        given, added = x.to(rig.device), residual.to(rig.device, copy=True)
        out = torch.empty_like(given)
        work = partial(add_rms_norm, given, added, weight.to(rig.device), eps, out)
        work()
        exact = _normed(total.double(), eps) * weight.double()
        errors += [error_of(added.cpu(), total.double()), error_of(out.cpu(), exact)]
    return rig.judge(errors, work, 4 * out.nbytes)


def check_activation(rig: Rig) -> Figures:
    """Check gated SiLU."""
    errors = []
    for rows in ROWS:
        given = rig.random(rows, 2 * rig.config.intermediate_size)
        gate_up = given.to(rig.device, copy=True)  # its gates are overwritten
        out = torch.empty(rows, rig.config.intermediate_size, dtype=rig.dtype, device=rig.device)
        work = partial(silu_mul, gate_up, out)
        work()
        gate, up = given.double().chunk(2, dim=-1)
        errors.append(error_of(out.cpu(), gate / (1 + torch.exp(-gate)) * up))
    return rig.judge(errors, work, gate_up.nbytes + out.nbytes)


def check_rope(rig: Rig) -> Figures:
    """Check the norms of heads, if the model has them, rotation, and KV writes to the cache."""
    config, errors = rig.config, []
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    for rows in ROWS:
        qkv = rig.random(rows, heads + 2 * kv_heads, head_dim)
        norms = rig.random(heads + kv_heads, head_dim).abs() + 0.1 if config.qk_norm else None
        angles = 100 * torch.rand(rows, 1, head_dim // 2)
        cos, sin = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), dim=-1)
        num_blocks = rows // BLOCK_SIZE + 2
        # Slots may start at any address, and some tokens are not stored.
        slots = torch.randperm(num_blocks * BLOCK_SIZE)[: rows + 1].int()
        slots[2::4] = -1
        cache_shape = (num_blocks, BLOCK_SIZE, kv_heads, head_dim)
        k_cache, v_cache = (
            torch.full(cache_shape, 7.0, dtype=rig.dtype, device=rig.device) for _ in range(2)
        )
        exact = qkv.double()
        turned = exact[:, :-kv_heads]
        if norms is not None:
            turned = _normed(turned, config.rms_norm_eps) * norms.double()
        exact[:, :-kv_heads] = turned * cos.double() + turned.roll(head_dim // 2, dims=-1) * sin.double()
        given, cos, sin, at = (x.to(rig.device) for x in (qkv.flatten(1), cos, sin, slots))
        norms = None if norms is None else norms.to(rig.device)
        work = partial(rope_append, given, cos, sin, at[1:], k_cache, v_cache, norms, config.rms_norm_eps)
        work()
        actual = given.cpu().view(qkv.shape)
        errors.append(error_of(actual, exact))
        stored = actual[:, heads:-kv_heads], actual[:, -kv_heads:]
        _check_stored(slots[1:], [k_cache.cpu(), v_cache.cpu()], stored)
    return rig.judge(errors, work, 2 * qkv.nbytes)


def _normed(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def check_quantised(rig: Rig) -> Figures:
    """Check matmuls with each stored weight type, for few and many rows."""
    hidden, rows = -(-rig.config.hidden_size // UNIT) * UNIT, QUANTISED_ROWS
    errors = []
    for name, counts in KINDS.items():
        weight = Grouped(name, rows, hidden, rig.device)
        weight.fill(torch.Generator(rig.device).manual_seed(0))
        exact = torch.empty(rows, hidden)
        grouped.dequantise(weight.to(torch.device("cpu")), 0, exact)
        for count in counts:
            given, bias = rig.random(count, hidden), rig.random(rows)
            x, offset = given.to(rig.device), bias.to(rig.device)
            out = torch.empty(count, rows, dtype=rig.dtype, device=rig.device)
            work = partial(multiply_packed, x, [weight], offset, out)
            work()
            if fallbacks.level("quantised") == "integers":
                given = grouped.rounded(given)
            errors.append(error_of(out.cpu(), given.double() @ exact.double().T + bias.double()))
        unpacked = torch.empty(rows, hidden, dtype=rig.dtype, device=rig.device)
        dequantise(weight, 0, unpacked)
        errors.append(error_of(unpacked.cpu(), exact.double()))
        packed = _host_tiles(name, rows, hidden)
        unpack.unpack_quantised(name, packed, exact)
        unpack_quantised(name, packed.to(rig.device), unpacked)
        errors.append(error_of(unpacked.cpu(), exact.double()))
    return rig.judge(errors, work, weight.nbytes + x.nbytes + out.nbytes)


def _host_tiles(type_name: str, rows: int, columns: int) -> Tensor:
    """Return tiles with random codes and small scales."""
    layout = unpack.LAYOUTS[type_name]
    packed = torch.empty(packed_bytes(type_name, rows, columns), dtype=torch.uint8)
    packed.random_(generator=torch.Generator().manual_seed(0))
    header = packed.view(-1, layout.unit_bytes)[:, : layout.header_bytes]
    scales = torch.linspace(0.001, 0.002, header.shape[1] // 2, dtype=layout.scale_dtype)
    header.copy_(scales.view(torch.uint8).expand_as(header))
    return packed


def _check_stored(slots: Tensor, caches: list[Tensor], rows: tuple[Tensor, Tensor]) -> None:
    is_stored = slots >= 0
    for cache, values in zip(caches, rows, strict=True):
        expected = torch.full_like(cache, 7.0)
        expected.view(-1, *cache.shape[2:])[slots[is_stored].long()] = values[is_stored]
        if not torch.equal(cache, expected):
            raise CheckError("keys or values in the cache differ from the computed ones")


def check_prompts(rig: Rig) -> Figures:
    """Check causal attention of chunks, with and without earlier tokens, and with sliding windows."""
    config, chunks, first = rig.config, [], 0
    for start, count in CHUNKS:
        rows = slice(first, first + count)
        chunks.append(Prefill(rows, start, torch.zeros(start + count, dtype=torch.int64, device=rig.device)))
        first += count
    given_q = rig.random(first, config.num_heads, config.head_dim) * rig.query_size
    lengths = [start + count for start, count in CHUNKS]
    rows_given = rig.random(2, sum(lengths), config.num_kv_heads, config.head_dim)
    q, contexts = given_q.to(rig.device), rows_given.to(rig.device)
    (group,) = groups_of(chunks)
    errors = []
    sinks = None if rig.sinks is None else rig.sinks.to(rig.device)
    spec = AttentionSpec(config.attention_scale, None, sinks, config.attention_softcap)
    out = torch.empty_like(q)
    for window in rig.windows:
        out.fill_(torch.nan)
        group.attend(q, contexts, out, spec._replace(window=window))
        actual = out.cpu()
        by_chunk = torch.split(rows_given, lengths, dim=1)
        for chunk, (k, v) in zip(chunks, by_chunk, strict=True):
            expected = _dense(rig, given_q[chunk.rows], k, v, window)
            errors.append(error_of(actual[chunk.rows], expected))
    work = partial(group.attend, q, contexts, out, spec)
    return rig.judge(errors, work, 2 * q.nbytes + contexts.nbytes)


def _dense(rig: Rig, q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """Return attention in float64; the last query sees the last key."""
    group = q.shape[1] // keys.shape[1]
    k, v = (part.double().repeat_interleave(group, 1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * rig.config.attention_scale
    scores = capped(scores, rig.config.attention_softcap)
    positions = torch.arange(len(k), device=q.device)
    distance = positions[-len(q) :, None] - positions
    hidden = (distance < 0) | (distance >= (window or len(k)))
    weights = weights_of(scores.masked_fill(hidden, -torch.inf), rig.sinks)
    return torch.einsum("hqk,khd->qhd", weights, v)
