"""Times a stage as the graphs of decodes run it: without the gaps that launching leaves."""

import time
from collections.abc import Callable

import torch

from neo_desktop.engine.execute.timeline import timed_event


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
