"""All cases, one after the other, and what should be said about them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch

from neo_desktop import native
from neo_desktop.app.bench.cpu_attention.measure import measure
from neo_desktop.app.bench.cpu_attention.options import CpuAttentionOptions
from neo_desktop.app.bench.cpu_attention.pool import Pool
from neo_desktop.app.bench.cpu_attention.report import CpuAttentionCase, CpuAttentionReport
from neo_desktop.app.bench.cpu_attention.rivals import (
    LlamaCpp,
    NoLlamaCppError,
    Rival,
    TorchSdpa,
    measure_rival,
)
from neo_desktop.app.bench.spread import number
from neo_desktop.engine.kv.layout import BLOCKS_PER_RUN
from neo_desktop.engine.profiling.hardware import last_level_cache_bytes
from neo_desktop.engine.progress import Progress


def run_cpu_attention(options: CpuAttentionOptions, progress: Progress) -> Iterator[CpuAttentionReport]:
    """Measure every case of `options`, a report after each.

    A case that does not fit into the cache is left out with a note.

    Raises MemoryError where the cache could not hold a single case.
    """
    progress(0.0, "making the KV cache")
    pool = Pool(options)
    wanted = [
        shape
        for group, head_dim in product(options.groups, options.head_dims)
        for shape in options.shapes(group, head_dim, pool.num_blocks(group, head_dim))
    ]
    fitting = [shape for shape in wanted if shape is not None]
    if not fitting:
        raise MemoryError(f"{pool.nbytes / 1e6:.0f} MB for the KV cache hold no case; free some memory")
    last_level_bytes = last_level_cache_bytes()
    notes = [_cache_note(pool.nbytes, last_level_bytes), _scatter_note(options)]
    if len(fitting) < len(wanted):
        notes.append(
            f"{len(wanted) - len(fitting)} cases were left out: their contexts do not fit into "
            f"{pool.nbytes / 1e6:.0f} MB."
        )
    rivals, rival_notes = _find_rivals(options)
    notes += rival_notes

    cases: list[CpuAttentionCase] = []
    for shape in fitting:
        sizes = f"{shape.batch} x {shape.context_tokens} tokens"
        what = f"group {shape.group}, head_dim {shape.head_dim}, {sizes}"
        progress(len(cases) / len(fitting), what)
        case = measure(pool, options, shape, options.seconds / len(fitting))
        seconds = options.rival_seconds / len(fitting) / max(len(rivals), 1)
        results = {key: measure_rival(each, pool, options, shape, seconds) for key, each in rivals.items()}
        cases.append(replace(case, rivals=results))
        yield CpuAttentionReport(
            dtype=str(options.dtype).removeprefix("torch."),
            block_size=options.block_size,
            page_tokens=options.page_tokens,
            fragmented=options.fragmented,
            num_threads=options.threads,
            isa=native.default_isa(),
            cache_bytes=pool.nbytes,
            last_level_cache_bytes=last_level_bytes,
            huge_pages=pool.huge_pages,
            notes=(*notes, *_rival_notes(rivals, cases)),
            cases=tuple(cases),
        )
    progress(1.0, "done")


def _find_rivals(options: CpuAttentionOptions) -> tuple[dict[str, Rival], list[str]]:
    """Return `key of RIVALS -> rival`, and why others are missing."""
    if options.rival_seconds <= 0:
        return {}, []
    if options.dtype is torch.int8:
        return {}, ["torch SDPA and llama.cpp are compared with float16 and bfloat16 KV only."]
    rivals: dict[str, Rival] = {"torch_sdpa": TorchSdpa()}
    try:
        rivals["llama_cpp"] = LlamaCpp()
    except NoLlamaCppError as error:
        return rivals, [f"{error}: not compared."]
    return rivals, []


def _rival_notes(rivals: dict[str, Rival], cases: Sequence[CpuAttentionCase]) -> list[str]:
    notes = []
    for key, rival in rivals.items():
        error = max(case.rivals[key].relative_error for case in cases)
        note = f"{rival.name}: GB/s on KV gathered beforehand; error up to {error:.0e}"
        fewer = sum(case.rivals[key].batch < case.batch for case in cases)
        if fewer:
            note += f"; fewer requests per call in {fewer} cases, to end in time"
        # The memory's speed changes while the suite runs: shares of it are what can be compared.
        ratios = [case.fraction / case.rivals[key].fraction for case in cases]
        times = f"{number(min(ratios))} to {number(max(ratios))} times as fast"
        slower = sum(ratio < 1 for ratio in ratios)
        beaten = f"slower in {slower} of {len(cases)} cases" if slower else "faster in every case"
        notes.append(f"{note}. Relative to the reads around each call neo-desktop is {times}, {beaten}.")
    return notes


def _cache_note(cache_bytes: int, last_level_bytes: int) -> str:
    if last_level_bytes == 0:
        return f"KV cache of {cache_bytes / 1e6:.0f} MB; the size of the last-level cache is unknown."
    times = cache_bytes / last_level_bytes
    size = f"KV cache of {cache_bytes / 1e6:.0f} MB, {times:.1f} times the last-level cache"
    if times >= 4:
        return f"{size}."
    return f"{size}: too small to rule out that part of it was read from there instead of from memory."


def _scatter_note(options: CpuAttentionOptions) -> str:
    blocks, pages = f"Blocks of {options.block_size} tokens lie", f"pages of {options.page_tokens}"
    if options.fragmented:
        return (
            f"{blocks} scattered one by one over {pages}: the worst case, which the engine avoids while "
            "there is memory to choose from."
        )
    return (
        f"{blocks} in runs of {BLOCKS_PER_RUN}, as the engine hands them out: {pages} tokens, scattered over "
        "the memory."
    )
