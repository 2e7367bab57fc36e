"""Times a stage as the graphs of decodes run it: without the gaps that launching leaves."""

import time
from collections.abc import Callable

import torch

from neo_desktop.engine.execute.graphs.bucket import Bucket, Most, Rows
from neo_desktop.engine.execute.graphs.layers import FusedLayers
from neo_desktop.engine.execute.graphs.workspace import SubBatchMemory, Workspace
from neo_desktop.engine.execute.timeline import timed_event
from neo_desktop.models.decoder import Decoder


def fused_linear(decoder: Decoder, tokens: int) -> tuple[Callable[[int], object], SubBatchMemory]:
    """Return the linear stages of a layer, by its number, for so many decodes, and what they work in.

    KV is stored nowhere.
    """
    workspace = Workspace(decoder.config, decoder.dtype, decoder.device, Most(tokens, 1), num_programs=1)
    layers = FusedLayers(decoder, workspace.scratch)
    (memory,) = workspace.sub_batches(Bucket((Rows(tokens, 0),), 1))
    memory.inputs.slots.fill_(-1)
    layers.embed(memory)
    config = decoder.config
    cache = memory.x.new_empty(1, 1, config.num_kv_heads, config.head_dim)

    def call(layer: int) -> None:
        layers.pre_attention(layer, memory, cache, cache)
        layers.post_attention(layer, memory)

    return call, memory


def launch_ms(device: torch.device, stream: torch.cuda.Stream) -> float:
    """Return what a graph takes that does next to nothing: to launch it and to see its end."""
    inputs = torch.empty(1024, dtype=torch.int32, device=device)
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            inputs.zero_()
        finally:
            graph.capture_end()
        graph.replay()
        stream.synchronize()
        start = time.perf_counter()
        graph.replay()
        stream.synchronize()
        return (time.perf_counter() - start) * 1e3


def graph_ms(call: Callable[[int], object], repeats: int, stream: torch.cuda.Stream) -> float:
    """Return the time of one call among `repeats` that follow each other in a graph.

    Args:
        stream: to capture on; never torch's default one, and always the same (`timing_stream`).
    """
    start, end = timed_event(), timed_event()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(repeats):  # compiles what is new
            call(step)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for step in range(repeats):
                call(step)
        finally:
            graph.capture_end()
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / repeats
