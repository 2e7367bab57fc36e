"""Check the Triton kernels against torch on a GPU, and their bandwidth against a copy's (see gpu_check.py).

The sizes are those of an 8B model; the data exceed a GPU's caches.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from neo_desktop.engine.execute.prefill import Prefill, groups_of
from neo_desktop.engine.execute.prefill_kernels import kernel_on
from neo_desktop.engine.kernels.dispatch import programs_per_sm
from neo_desktop.engine.kernels.in_triton.activation import silu_mul
from neo_desktop.engine.kernels.in_triton.norm import add_rms_norm
from neo_desktop.engine.kernels.in_triton.paged_decode import paged_decode
from neo_desktop.engine.kernels.in_triton.quantised import dequantise, multiply_packed
from neo_desktop.engine.kernels.in_triton.rope_append import rope_append
from neo_desktop.engine.kernels.in_triton.row_copy import read_rows, write_rows
from neo_desktop.engine.kernels.occupancy import num_splits
from neo_desktop.models import operators
from neo_desktop.models.attention import AttentionSpec
from neo_desktop.models.linear import grouped
from neo_desktop.models.linear.grouped import CODINGS, Grouped

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, BLOCK_SIZE = 32, 8, 128, 4096, 14336, 16
EPS = 1e-5
MATRICES = 8  # quantised, of 33 MB or more
# Relative error of an output as one vector.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel with its arguments."""

    name: str
    launch: Callable[[], object]
    results: tuple[Tensor, ...]  # changed by a launch
    expected: tuple[Tensor, ...]
    num_bytes: int  # read and written

    def compare(self, dtype: torch.dtype) -> None:
        for result, expected in zip(self.results, self.expected, strict=True):
            error = float((result.float() - expected.float()).norm() / expected.float().norm())
            assert error <= TOLERANCE[dtype], f"{self.name}, {dtype}: relative error {error:.1e}"


def random_lengths(device: torch.device, requests: int, context: int) -> Tensor:
    """Draw lengths from half of `context` to `context`; the first request is padding."""
    lengths = torch.randint(context // 2, context + 1, (requests,), dtype=torch.int32, device=device)
    lengths[0] = 0
    return lengths


def decode_case(
    dtype: torch.dtype, num_sms: int, lengths: Tensor, context: int, window: int | None = None
) -> Case:
    """Return a case for contexts of these lengths, at most `context`, in scattered blocks."""
    device, requests = lengths.device, len(lengths)
    tables = torch.randperm(requests * context // BLOCK_SIZE, device=device).int().view(requests, -1)
    cache_shape = (tables.numel(), BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    k_cache, v_cache = (torch.randn(cache_shape, dtype=dtype, device=device) for _ in range(2))
    q = torch.randn(requests, HEADS, HEAD_DIM, dtype=dtype, device=device)
    out = torch.empty_like(q)
    num_programs = num_sms * programs_per_sm(q, k_cache, v_cache)
    splits = num_splits(requests, KV_HEADS, min(context, window or context), num_programs)
    partial_out = torch.empty(requests, HEADS, splits, HEAD_DIM, device=device)
    partial_lse = torch.empty(requests, HEADS, splits, device=device)
    scale = HEAD_DIM**-0.5

    expected = torch.zeros(q.shape, device=device)
    for request in range(1, requests):
        end = int(lengths[request])
        begin = max(end - (window or end), 0)
        k, v = (cache[tables[request].long()].flatten(0, 1)[begin:end] for cache in (k_cache, v_cache))
        expected[request] = dense(q[request : request + 1], k, v, scale, None)[0]
    attended = int(lengths.clamp(max=window or context).sum())
    return Case(
        f"decode attention of {requests} x {context}, window {window}, {splits} splits",
        lambda: paged_decode(
            q, k_cache, v_cache, tables, lengths, out, partial_out, partial_lse, scale, window
        ),
        (out,),
        (expected,),
        2 * attended * KV_HEADS * HEAD_DIM * dtype.itemsize,
    )


def rope_case(dtype: torch.dtype, device: torch.device, tokens: int) -> Case:
    """Return a case with norms; every fourth token is not stored."""
    qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=dtype, device=device)
    qk_norm = torch.rand(HEADS + KV_HEADS, HEAD_DIM, device=device).to(dtype)
    frequencies = 500_000.0 ** -(torch.arange(HEAD_DIM // 2, device=device) / (HEAD_DIM // 2))
    cos, sin = torch.empty(2, tokens, 1, HEAD_DIM, device=device)
    operators.rotation(torch.randint(8192, (tokens,), device=device), frequencies, 1.0, cos, sin)
    slots = torch.randperm(tokens, device=device)
    slots[::4] = -1
    cache_shape = (tokens // BLOCK_SIZE, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    k_cache, v_cache = (torch.zeros(cache_shape, dtype=dtype, device=device) for _ in range(2))

    heads = qkv.clone()
    operators.rope(heads.view(tokens, -1), cos, sin, KV_HEADS, qk_norm, EPS)
    is_stored = slots >= 0
    expected_caches = [torch.zeros_like(cache) for cache in (k_cache, v_cache)]
    for cache, rows in zip(expected_caches, heads[:, HEADS:].split(KV_HEADS, dim=1), strict=True):
        cache.view(tokens, KV_HEADS, HEAD_DIM)[slots[is_stored]] = rows[is_stored]
    row = qkv.flatten(1)
    rotated, stored = tokens * (HEADS + KV_HEADS), 2 * int(is_stored.sum()) * KV_HEADS
    written_bytes = (rotated + stored) * HEAD_DIM * dtype.itemsize
    return Case(
        f"rotation and store of {tokens} tokens",
        lambda: rope_append(row, cos, sin, slots, k_cache, v_cache, qk_norm, EPS),
        (row, k_cache, v_cache),
        (heads.flatten(1), *expected_caches),
        row.nbytes + written_bytes + cos.nbytes,  # half of cos, half of sin
    )


def norm_case(dtype: torch.dtype, device: torch.device, tokens: int) -> Case:
    x, residual = (torch.randn(tokens, HIDDEN, dtype=dtype, device=device) for _ in range(2))
    weight = torch.rand(HIDDEN, device=device).to(dtype)
    out, expected, total = (torch.empty_like(x) for _ in range(3))
    operators.add_rms_norm(x, total.copy_(residual), weight, EPS, expected)
    return Case(
        f"addition and norm of {tokens} tokens",
        lambda: add_rms_norm(x, residual, weight, EPS, out),
        (residual, out),
        (total, expected),
        4 * x.nbytes,
    )


def silu_case(dtype: torch.dtype, device: torch.device, tokens: int) -> Case:
    gate_up = torch.randn(tokens, 2 * INTERMEDIATE, dtype=dtype, device=device)
    out, expected = torch.empty(2, tokens, INTERMEDIATE, dtype=dtype, device=device)
    operators.silu_mul(gate_up.clone(), expected)
    return Case(
        f"gated SiLU of {tokens} tokens",
        lambda: silu_mul(gate_up, out),
        (out,),
        (expected,),
        gate_up.nbytes + out.nbytes,
    )


def copy_cases(dtype: torch.dtype, device: torch.device, tokens: int) -> Iterator[Case]:
    """Yield copies of half of the rows, out of the cache and into another one."""
    cache_shape = (tokens // BLOCK_SIZE, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    k_cache, v_cache = (torch.randn(cache_shape, dtype=dtype, device=device) for _ in range(2))
    slots = torch.randperm(tokens, device=device)[: tokens // 2]
    rows = torch.stack([cache.flatten(0, 1)[slots] for cache in (k_cache, v_cache)])
    found = torch.empty_like(rows)
    yield Case(
        f"{len(slots)} rows out of the cache",
        lambda: read_rows(found[0], found[1], k_cache, v_cache, slots),
        (found,),
        (rows,),
        2 * rows.nbytes,
    )
    targets = [torch.zeros_like(cache) for cache in (k_cache, v_cache)]
    expected = [torch.zeros_like(cache) for cache in (k_cache, v_cache)]
    for cache, own in zip(expected, rows, strict=True):
        cache.flatten(0, 1)[slots] = own
    yield Case(
        f"{len(slots)} rows into the cache",
        lambda: write_rows(rows[0], rows[1], targets[0], targets[1], slots),
        tuple(targets),
        tuple(expected),
        2 * rows.nbytes,
    )


def product_cases(
    dtype: torch.dtype, device: torch.device, rows: int = INTERMEDIATE, columns: int = HIDDEN
) -> Iterator[Case]:
    """Yield quantised matrices by type, in a number that exceeds any cache."""
    for name in CODINGS:
        weights = [Grouped(name, rows, columns, device) for _ in range(MATRICES)]
        for weight in weights:
            weight.fill(torch.Generator(device).manual_seed(len(name)))
        floats = torch.empty(rows, columns, dtype=torch.float32, device=device)
        grouped.dequantise(weights[0], 0, floats)
        for count in (1, 2, 4, 8, 16):
            x = (torch.randn(count, columns, device=device) / 64).to(dtype)  # float16 holds the sums
            outs = torch.empty(MATRICES, count, rows, dtype=dtype, device=device)
            yield Case(
                f"product of {count} rows and a matrix of {rows} x {columns} in {name}",
                partial(multiply_all, x, weights, outs),
                (outs[0],),
                (grouped.rounded(x) @ floats.T,),
                sum(weight.nbytes for weight in weights) + MATRICES * (x.nbytes + outs[0].nbytes),
            )
        found = torch.empty(rows, columns, dtype=dtype, device=device)
        yield Case(
            f"{rows} x {columns} floats of a matrix in {name}",
            partial(dequantise, weights[0], 0, found),
            (found,),
            (floats,),
            weights[0].nbytes + found.nbytes,
        )


def multiply_all(x: Tensor, weights: Sequence[Grouped], outs: Tensor) -> None:
    """Multiply the rows with each matrix."""
    for weight, out in zip(weights, outs, strict=True):
        multiply_packed(x, [weight], None, out)


def prefill_case(dtype: torch.dtype, device: torch.device, window: int | None) -> Case:
    """Return chunks with and without earlier tokens; a group is attended to as in an iteration."""
    starts, counts = (0, 1000, 2000), (300, 24, 500)
    ends = list(accumulate(counts, initial=0))
    chunks = [
        Prefill(slice(begin, end), start, torch.zeros(start + end - begin, dtype=torch.int64, device=device))
        for start, begin, end in zip(starts, ends, ends[1:], strict=False)
    ]
    q = torch.randn(ends[-1], HEADS, HEAD_DIM, dtype=dtype, device=device)
    context_lens = [chunk.context_len for chunk in chunks]
    contexts = torch.randn(2, sum(context_lens), KV_HEADS, HEAD_DIM, dtype=dtype, device=device)
    out, scale = torch.empty_like(q), HEAD_DIM**-0.5
    (group,) = groups_of(chunks)
    expected = [
        dense(q[chunk.rows], k, v, scale, window)
        for chunk, (k, v) in zip(chunks, contexts.split(context_lens, dim=1), strict=True)
    ]
    kernel = kernel_on(device, dtype, HEAD_DIM, window is not None)
    return Case(
        f"prefill attention ({kernel}) of {len(q)} tokens, window {window}",
        lambda: group.attend(q, contexts, out, AttentionSpec(scale, window)),
        (out,),
        (torch.cat(expected),),
        2 * q.nbytes + contexts.nbytes,
    )


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Return causal attention of the last tokens of one context, in float32, with all scores in memory."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    distance = torch.arange(len(k) - len(q), len(k), device=q.device).unsqueeze(1)
    distance = distance - torch.arange(len(k), device=q.device)
    hidden = (distance < 0) | (distance >= (window or len(k)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def cases(dtype: torch.dtype, device: torch.device, num_sms: int, tokens: int) -> Iterator[Case]:
    """Yield each kernel, for `tokens` tokens in total."""
    for requests, window in ((32, None), (32, tokens // 128), (4, None)):
        context = tokens // requests
        yield decode_case(dtype, num_sms, random_lengths(device, requests, context), context, window)
    yield rope_case(dtype, device, tokens // 8)
    yield norm_case(dtype, device, tokens // 8)
    yield silu_case(dtype, device, tokens // 8)
    yield from copy_cases(dtype, device, tokens)
    for window in (None, 700):
        yield prefill_case(dtype, device, window)
    yield from product_cases(dtype, device)


def elapsed_ms(launch: Callable[[], object], repetitions: int = 10, at_once: int = 5) -> float:
    """Return a launch's median time on the GPU; a graph of several launches hides Python's own time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(at_once):
            launch()
    times_ms = []
    for _ in range(repetitions):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_ms.append(float(begin.elapsed_time(end)) / at_once)
    return statistics.median(times_ms)


def check_graph(device: torch.device, num_sms: int) -> None:
    """Check that a graph serves other lengths than the captured ones."""
    lengths = random_lengths(device, requests=8, context=2048)
    case = decode_case(torch.float16, num_sms, lengths, context=2048)
    wanted = lengths.clone()
    lengths.fill_(1)
    case.launch()  # compiles, which a capture forbids
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.launch()
    lengths.copy_(wanted)
    graph.replay()
    case.compare(torch.float16)
    print("kernel float16, decode attention in a CUDA graph: other lengths than when it was captured")


def check_kernels() -> None:
    """Compare every kernel with torch; print its bandwidth, also as a share of a copy's.

    Raises:
        AssertionError: some results differ; all kernels have run.
    """
    torch.manual_seed(0)
    device = torch.device("cuda")
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
    wrong: list[str] = []
    for dtype in (torch.float16, torch.bfloat16) if has_bf16 else (torch.float16,):
        for case in cases(dtype, device, num_sms, tokens=65_536):
            case.launch()
            try:
                case.compare(dtype)
            except AssertionError as error:
                wrong.append(str(error))
            time_ms = elapsed_ms(case.launch)
            source = torch.empty(case.num_bytes // 2, dtype=torch.int8, device=device)
            target = torch.empty_like(source)
            copy_ms = elapsed_ms(partial(target.copy_, source))
            print(
                f"kernel {str(dtype).removeprefix('torch.')}, {case.name}: {1000 * time_ms:.0f} us, "
                f"{case.num_bytes / time_ms / 1e6:.0f} GB/s, {copy_ms / time_ms:.0%} of a copy's bandwidth"
            )
    for window in (None, 700):  # the 16-bit path of GPUs older than 8.0
        case = prefill_case(torch.float32, device, window)
        case.launch()
        case.compare(torch.float32)
        print(f"kernel float32, {case.name}")
    check_graph(device, num_sms)
    assert not wrong, f"{len(wrong)} kernels differ from torch: {'; '.join(wrong)}"
