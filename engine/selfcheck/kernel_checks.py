"""Checks of every GPU kernel at every fallback level, against float64, with the model's shapes.

References are computed on the CPU, because the GPU is under test.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from neo_desktop.engine.doctor.outcome import CheckError, Figure, Figures
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
from neo_desktop.engine.selfcheck.kv_checks import (
    BOUNDS,
    capped,
    check_decode,
    check_rows,
    error_of,
    weights_of,
)
from neo_desktop.engine.selfcheck.recurrent_checks import check_recurrent
from neo_desktop.engine.selfcheck.rig import Rig, on_levels, require
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
    figures: dict[str, Figure] = {}
    hidden, eps = rig.config.hidden_size, rig.config.rms_norm_eps
    weight = _random(rig, hidden).abs() + 0.1
    there = partial(torch.Tensor.to, device=rig.device)
    errors = [0.0]
    for rows in ROWS:
        x, residual = _random(rig, rows, hidden), _random(rig, rows, hidden)
        total = (x.float() + residual.float()).to(rig.dtype)
        x, added = there(x), there(residual).clone()
        out = torch.empty_like(x)
        add_rms_norm(x, added, there(weight), eps, out)
        exact = total.double()
        exact = exact / (exact.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
        errors += [error_of(added.cpu(), total.double()), error_of(out.cpu(), exact)]
    require(_worst(errors), BOUNDS[rig.dtype], figures)
    work = partial(add_rms_norm, x, added, there(weight), eps, out)
    return {**figures, "ms": rig.milliseconds(work), "bytes": 4 * x.nbytes}


def check_activation(rig: Rig) -> Figures:
    """Check gated SiLU."""
    figures: dict[str, Figure] = {}
    errors = [0.0]
    for rows in ROWS:
        given = _random(rig, rows, 2 * rig.config.intermediate_size)
        gate_up = given.to(rig.device, copy=True)  # its gates are overwritten
        out = torch.empty(rows, rig.config.intermediate_size, dtype=rig.dtype, device=rig.device)
        silu_mul(gate_up, out)
        gate, up = given.double().chunk(2, dim=-1)
        errors.append(error_of(out.cpu(), gate / (1 + torch.exp(-gate)) * up))
    require(_worst(errors), BOUNDS[rig.dtype], figures)
    work = partial(silu_mul, gate_up, out)
    return {**figures, "ms": rig.milliseconds(work), "bytes": gate_up.nbytes + out.nbytes}


def check_rope(rig: Rig) -> Figures:
    """Check the norms of heads, if the model has them, rotation, and KV writes to the cache."""
    config, figures = rig.config, dict[str, Figure]()
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    errors = [0.0]
    for rows in ROWS:
        qkv = _random(rig, rows, heads + 2 * kv_heads, head_dim)
        norms = _random(rig, heads + kv_heads, head_dim).abs() + 0.1 if config.qk_norm else None
        angles = 100 * torch.rand(rows, 1, head_dim // 2)
        cos, sin = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), dim=-1)
        num_blocks = rows // BLOCK_SIZE + 2
        # Slots may start at any address, and some tokens are not stored.
        slots = torch.randperm(num_blocks * BLOCK_SIZE)[: rows + 1].int()
        slots[2::4] = -1
        caches = [
            torch.full((num_blocks, BLOCK_SIZE, kv_heads, head_dim), 7.0, dtype=rig.dtype, device=rig.device)
            for _ in range(2)
        ]
        exact = qkv.double()
        if norms is not None:
            normed = exact[:, :-kv_heads]
            normed = normed / (normed.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
            exact[:, :-kv_heads] = normed * norms.double()
        turned = exact[:, :-kv_heads]
        streamed = turned.roll(head_dim // 2, dims=-1)
        exact[:, :-kv_heads] = turned * cos.double() + streamed * sin.double()
        on_device = [
            None if tensor is None else tensor.to(rig.device)
            for tensor in (qkv.flatten(1), cos, sin, slots, norms)
        ]
        rows_there, cos_there, sin_there, slots_there, norms_there = on_device
        assert rows_there is not None
        assert cos_there is not None
        assert sin_there is not None
        assert slots_there is not None
        work = partial(
            rope_append,
            rows_there,
            cos_there,
            sin_there,
            slots_there[1:],
            caches[0],
            caches[1],
            norms_there,
            config.rms_norm_eps,
        )
        work()
        actual = rows_there.cpu().view(qkv.shape)
        errors.append(error_of(actual, exact))
        _check_stored(
            slots[1:],
            [cache.cpu() for cache in caches],
            (actual[:, heads:-kv_heads], actual[:, -kv_heads:]),
        )
    require(_worst(errors), BOUNDS[rig.dtype], figures)
    return {**figures, "ms": rig.milliseconds(work), "bytes": 2 * qkv.nbytes}


def check_quantised(rig: Rig) -> Figures:
    """Check matmuls with each stored weight type, for few and many rows."""
    figures: dict[str, Figure] = {}
    hidden, rows = -(-rig.config.hidden_size // UNIT) * UNIT, QUANTISED_ROWS
    errors, work = [0.0], None
    for name, counts in KINDS.items():
        weight = Grouped(name, rows, hidden, rig.device)
        weight.fill(torch.Generator(rig.device).manual_seed(0))
        exact = torch.empty(rows, hidden)
        grouped.dequantise(weight.to(torch.device("cpu")), 0, exact)
        for count in counts:
            given, bias = _random(rig, count, hidden), _random(rig, rows)
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
    assert work is not None
    require(_worst(errors), BOUNDS[rig.dtype], figures)
    return {**figures, "ms": rig.milliseconds(work), "bytes": weight.nbytes + x.nbytes + out.nbytes}


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
    config, figures = rig.config, dict[str, Figure]()
    chunks, first = [], 0
    for start, count in CHUNKS:
        rows = slice(first, first + count)
        chunks.append(Prefill(rows, start, torch.zeros(start + count, dtype=torch.int64, device=rig.device)))
        first += count
    given_q = _random(rig, first, config.num_heads, config.head_dim) * rig.query_size
    lengths = [start + count for start, count in CHUNKS]
    rows_given = _random(rig, 2, sum(lengths), config.num_kv_heads, config.head_dim)
    q, contexts = given_q.to(rig.device), rows_given.to(rig.device)
    (group,) = groups_of(chunks)
    errors = [0.0]
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
    require(_worst(errors), BOUNDS[rig.dtype], figures)
    work = partial(group.attend, q, contexts, out, spec)
    return {**figures, "ms": rig.milliseconds(work), "bytes": 2 * q.nbytes + contexts.nbytes}


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


def _random(rig: Rig, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(rig.dtype)


def _worst(errors: list[float]) -> float:
    """Return the largest error, or nan if any is nan."""
    return float(torch.tensor(errors, dtype=torch.float64).max())
