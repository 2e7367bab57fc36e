"""Checks of every GPU kernel at every fallback level, with the model's shapes.

The reference is torch's version of a kernel on the CPU, in float32, because the GPU is under test. Attention
is compared with float64.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from neo_desktop import native
from neo_desktop.engine.doctor.outcome import CheckError, Figures
from neo_desktop.engine.execute.prefill import Prefill, groups_of
from neo_desktop.engine.fallbacks import MECHANISMS, fallbacks
from neo_desktop.engine.kernels.dispatch import (
    add_rms_norm,
    choose_experts,
    dequantise,
    multiply_experts,
    multiply_packed,
    rope_append,
    scan_state,
    short_convolution,
    silu_mul,
    unpack_quantised,
)
from neo_desktop.engine.kv.device_layer import DeviceLayer
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.selfcheck.check import Check
from neo_desktop.engine.selfcheck.kv_checks import check_decode, check_rows, dense
from neo_desktop.engine.selfcheck.rig import Comparison, Rig, on_levels, require
from neo_desktop.models import operators
from neo_desktop.models.attention import AttentionSpec
from neo_desktop.models.expert_operators import Choice, ExpertScratch
from neo_desktop.models.linear import grouped, unpack
from neo_desktop.models.linear.grouped import MOST_ROWS, UNIT, Grouped
from neo_desktop.models.linear.stacked import Stacked, StackedExperts
from neo_desktop.models.recurrent import Spans

DEADLINE_S = 90.0  # the first launch compiles, possibly on a slow computer
ROWS = (1, 3, 32, 250)
# Types of quantised weights, one per coding scheme -> rows of inputs.
KINDS = {"Q8_0": (1, 8), "Q4_1": (3,), "Q4_K": (1, MOST_ROWS, MOST_ROWS + 1), "Q6_K": (3, 8), "MXFP4": (2,)}
QUANTISED_ROWS = 80  # rows of a matrix: a full tile and a partial one
CHUNKS = ((0, 1), (0, 40), (130, 7), (300, 200))  # (tokens before, tokens) of prompt chunks
EXPERTS, PER_TOKEN, INTERMEDIATE = 6, 2, 64
EXPERT_KINDS = (None, "Q8_0", "Q4_1")  # weight formats; None: floats
EXPERT_ROWS = (1, 3, 40)
MOST_HIDDEN = 1024  # limit for checks of experts: larger sizes use the same code
ROUNDED_BOUND = 0.1  # relative error of products whose inputs are rounded to 8 bits: 0.01 to 0.05
KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 128, 48  # of recurrent layers
CHANNELS, WIDTH = 200, 4
SPANS, SLOTS = ((0, 5, 0, 3), (5, 6, 2, 2), (6, 46, -1, 1)), 5  # {first, end, source, target}
SHORT_SPANS = SPANS[:2]  # too few tokens for chunks

Kernel = Callable[[Rig], Figures]


def kernel_checks(rig: Rig) -> Iterator[Check]:
    """Yield the checks of every kernel at every level, the highest first."""
    kernels: dict[str, Kernel] = {
        "row_copy": lambda rig: check_rows(rig, rig.dtype, kind=DeviceLayer),
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
            run = partial(_on_levels, rig, check, {**others, name: level.name})
            yield Check.of_level(name, level.name, DEADLINE_S, run)


def _on_levels(rig: Rig, check: Kernel, levels: dict[str, str]) -> Figures:
    with on_levels(levels), torch.inference_mode():
        return check(rig)


def check_norm(rig: Rig) -> Figures:
    """Check the sum of x and the residual, and its norm."""
    hidden, compared = rig.config.hidden_size, Comparison(rig)
    weight = rig.random(hidden).abs() + 0.1
    for rows in ROWS:
        x, out = rig.random(rows, hidden), rig.zeros(rows, hidden)
        arguments = x, x.flip(0), weight, rig.config.rms_norm_eps, out
        compared.run(add_rms_norm, operators.add_rms_norm, arguments, outputs=(1, 4))
    return compared.figures(4 * out.nbytes)


def check_activation(rig: Rig) -> Figures:
    """Check gated SiLU."""
    compared = Comparison(rig)
    for rows in ROWS:
        gate_up = rig.random(rows, 2 * rig.config.intermediate_size)
        out = rig.zeros(rows, rig.config.intermediate_size)
        compared.run(silu_mul, operators.silu_mul, (gate_up, out), outputs=(1,))
    return compared.figures(gate_up.nbytes + out.nbytes)


def check_rope(rig: Rig) -> Figures:
    """Check the norms of heads, if the model has them, rotation, and KV writes to the cache."""
    config, compared = rig.config, Comparison(rig)
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    for rows in ROWS:
        qkv = rig.random(rows, (heads + 2 * kv_heads) * head_dim)
        norms = rig.random(heads + kv_heads, head_dim).abs() + 0.1 if config.qk_norm else None
        angles = 100 * torch.rand(rows, 1, head_dim // 2)
        cos, sin = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), dim=-1)
        num_blocks = rows // BLOCK_SIZE + 2
        slots = torch.randperm(num_blocks * BLOCK_SIZE)[:rows].int()
        slots[1::4] = -1  # not stored
        caches = (rig.zeros(num_blocks, BLOCK_SIZE, kv_heads, head_dim).fill_(7.0) for _ in range(2))
        arguments = qkv, cos, sin, slots, *caches, norms, config.rms_norm_eps
        compared.run(rope_append, operators.rope_append, arguments, outputs=(0, 4, 5))
    return compared.figures(2 * qkv.nbytes)


def check_quantised(rig: Rig) -> Figures:
    """Check matmuls with each stored weight type, for few and many rows."""
    hidden, rows, compared = -(-rig.config.hidden_size // UNIT) * UNIT, QUANTISED_ROWS, Comparison(rig)

    def reference(x: Tensor, weights: list[Grouped], bias: Tensor, out: Tensor) -> None:
        inputs = grouped.rounded(x) if fallbacks.level("quantised") == "integers" else x
        grouped.multiply_packed(inputs, weights, bias, out)

    for name, counts in KINDS.items():
        weight = _quantised(rig, name, rows, hidden)
        unpacked = rig.zeros(rows, hidden)
        compared.run(dequantise, grouped.dequantise, (weight, 0, unpacked), outputs=(2,))
        packed = _host_tiles(name, rows, hidden)
        compared.run(unpack_quantised, unpack.unpack_quantised, (name, packed, unpacked), outputs=(2,))
        for count in counts:
            x, out = rig.random(count, hidden), rig.zeros(count, rows)
            compared.run(multiply_packed, reference, (x, [weight], rig.random(rows), out), outputs=(3,))
    return compared.figures(weight.nbytes + x.nbytes + out.nbytes)


def _quantised(rig: Rig, name: str, rows: int, columns: int) -> Grouped:
    weight = Grouped(name, rows, columns, rig.device)
    weight.fill(torch.Generator(rig.device).manual_seed(0))
    return weight


def _host_tiles(type_name: str, rows: int, columns: int) -> Tensor:
    """Return tiles with random codes and small scales."""
    layout = unpack.LAYOUTS[type_name]
    packed = torch.empty(native.packed_bytes(type_name, rows, columns), dtype=torch.uint8)
    packed.random_(generator=torch.Generator().manual_seed(0))
    header = packed.view(-1, layout.unit_bytes)[:, : layout.header_bytes]
    scales = torch.linspace(0.001, 0.002, header.shape[1] // 2, dtype=layout.scale_dtype)
    header.copy_(scales.view(torch.uint8).expand_as(header))
    blocks = packed.view(-1, layout.unit_bytes)[:, layout.header_bytes :]
    blocks.view(-1, layout.unit_blocks, layout.block_bytes)[..., : layout.scale_bytes] &= 63  # as files have
    return packed


def check_experts(rig: Rig) -> Figures:
    """Check the choice of experts, and their outputs for few and many rows."""
    hidden = min(-(-rig.config.hidden_size // 64) * 64, MOST_HIDDEN)
    compared, rounded = Comparison(rig), Comparison(rig)
    for kind in EXPERT_KINDS:
        is_rounded = kind is not None and fallbacks.level("quantised") == "integers"
        experts = _experts(rig, kind, hidden)
        for rows in EXPERT_ROWS:
            pairs = rows * PER_TOKEN
            choice = Choice.empty(rows, PER_TOKEN, torch.device("cpu"))
            logits = torch.randn(rows, EXPERTS).to(rig.dtype)
            arguments = logits, True, choice.ids.fill_(-1), choice.weights
            ids, weights = compared.run(choose_experts, operators.choose_experts, arguments, outputs=(3,))[2:]
            _check_best(logits, ids.cpu().long())
            gate_up, gated = rig.zeros(pairs, 2 * INTERMEDIATE), rig.zeros(pairs, INTERMEDIATE)
            room = ExpertScratch(logits, choice, gate_up, gated, rig.zeros(pairs, hidden), PER_TOKEN)
            x, out = torch.randn(rows, hidden).to(rig.dtype), rig.zeros(rows, hidden)
            (rounded if is_rounded else compared).run(
                multiply_experts,
                operators.multiply_experts,
                (experts, x, ids, weights, room, out),
                outputs=(5,),
            )
    require(rounded.worst, ROUNDED_BOUND, {})
    return compared.figures(gate_up.nbytes + gated.nbytes + room.products.nbytes)


def _experts(rig: Rig, kind: str | None, hidden: int) -> StackedExperts:
    stacked = []
    for rows, columns in ((INTERMEDIATE, hidden), (INTERMEDIATE, hidden), (hidden, INTERMEDIATE)):
        weight: Tensor | Grouped
        if kind is None:
            weight = (torch.randn(EXPERTS * rows, columns) / columns**0.5).to(rig.dtype)
        else:
            weight = _quantised(rig, kind, EXPERTS * rows, columns)
            weight.scales.mul_(0.02)
        stacked.append(Stacked(weight, None, rows))
    gate, up, down = stacked
    experts = rig.config.experts
    return StackedExperts(EXPERTS, gate, up, down, "silu" if experts is None else experts.gating)


def _check_best(logits: Tensor, chosen: Tensor) -> None:
    """Raise CheckError unless these experts have the highest logits; equal ones may be exchanged."""
    if chosen.min() < 0 or chosen.max() >= EXPERTS:
        raise CheckError("experts were chosen that do not exist")
    if not torch.equal(logits.gather(1, chosen), logits.topk(PER_TOKEN).values):
        raise CheckError("other experts than the best were chosen")


def check_recurrent(rig: Rig) -> Figures:
    """Check scans with and without the delta rule, and short convolutions: outputs and states."""
    compared = Comparison(rig)
    for table in (SHORT_SPANS, SPANS):
        _check_spans(rig, compared, table)
    return compared.figures(2 * HEADS * KEY_DIM * VALUE_DIM * 4 * len(SPANS))


def _check_spans(rig: Rig, compared: Comparison, table: tuple[tuple[int, ...], ...]) -> None:
    rows, longest = table[-1][1], max(end - first for first, end, *_ in table)
    spans = Spans(torch.tensor(table, dtype=torch.int32), longest)
    generator = torch.Generator().manual_seed(rows)
    normal, uniform = (partial(draw, generator=generator) for draw in (torch.randn, torch.rand))
    x, out = normal(rows, CHANNELS).to(rig.dtype), rig.zeros(rows, CHANNELS)
    state = normal(SLOTS, WIDTH - 1, CHANNELS)
    compared.run(
        partial(short_convolution, has_silu=True),
        partial(operators.short_convolution, has_silu=True),
        (x, normal(WIDTH, CHANNELS), normal(CHANNELS), state, spans, out),
        outputs=(3, 5),
        scratch=3,
    )
    for is_delta in (False, True):
        q, k = (normalize(normal(rows, KEY_HEADS, KEY_DIM), dim=-1).to(rig.dtype) for _ in range(2))
        v, decay = normal(rows, HEADS, VALUE_DIM).to(rig.dtype), -uniform(rows, HEADS)
        beta = uniform(rows, HEADS)
        state = normal(SLOTS, HEADS, KEY_DIM, VALUE_DIM)
        arguments = q, k, v, decay, beta, state, spans, torch.empty_like(v)
        ours, theirs = (partial(scan, is_delta=is_delta) for scan in (scan_state, operators.scan_state))
        compared.run(ours, theirs, arguments, outputs=(5, 7), scratch=5)


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
    compared = Comparison(rig)
    sinks = None if rig.sinks is None else rig.sinks.to(rig.device)
    spec = AttentionSpec(config.attention_scale, None, sinks, config.attention_softcap)
    out = torch.empty_like(q)
    for window in rig.windows:
        out.fill_(torch.nan)
        group.attend(q, contexts, out, spec._replace(window=window))
        actual = out.cpu()
        by_chunk = torch.split(rows_given, lengths, dim=1)
        for chunk, (k, v) in zip(chunks, by_chunk, strict=True):
            expected = dense(rig, given_q[chunk.rows], k, v, window)
            compared.note(actual[chunk.rows], expected)
    compared.work = partial(group.attend, q, contexts, out, spec)
    return compared.figures(2 * q.nbytes + contexts.nbytes)
