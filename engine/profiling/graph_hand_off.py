"""Measures what it takes to let the CPU attend in the middle of a CUDA graph, as iterations of decodes do.

device   |kernel|                           |kernel|
to-host         |copy|flag
(relay)                   |attend|flag
to-device                             |copy|
"""

import time

import torch

from neo_desktop.engine.execute.graphs.streams import Lane, Mark, Recorder, Runner
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.native.relay import DONE, READY, Relay, RelayBatch, RelayLayer, empty_flags

CHAIN = 32  # round trips in a row, as in an iteration over so many layers
PATIENCE_S = 10.0  # for one of them, which takes microseconds
_HEADS, _HEAD_DIM = 16, 64  # 4 KiB of float32: what one request hands over
_ROW_BYTES = _HEADS * _HEAD_DIM * torch.float32.itemsize


class GraphHandOff:
    """Round trips through the native relay; every request attends to itself alone, which takes no time.

    Args:
        device: a GPU; tests run on a CPU, with a runner that imitates streams.
        runner: of the graphs.
    """

    def __init__(self, device: torch.device, runner: Runner) -> None:
        self._device = device
        self._runner = runner

    def seconds(self, nbytes: int) -> float:
        """Seconds of one round trip with so many bytes each way, without the attention itself.

        Raises:
            RelayStalledError: nothing came for long.
            StreamMemoryError: the driver refuses.
            RuntimeError: what came back is not what was sent.
        """
        device, requests = self._device, max(nbytes // _ROW_BYTES, 1)
        pinned = device.type == "cuda"
        cache = torch.zeros(requests, 1, 1, _HEAD_DIM)
        layer = RelayLayer(cache, cache.clone(), None, None, window=0)
        relay = Relay([layer] * CHAIN, block_size=1, scale=1.0)
        qkv = torch.zeros(requests, _HEADS + 2, _HEAD_DIM, device=device)
        out = torch.empty(requests, _HEADS, _HEAD_DIM, device=device)
        qkv_on_host = torch.empty(qkv.shape, pin_memory=pinned)
        out_on_host = torch.empty(out.shape, pin_memory=pinned)
        flags = empty_flags(CHAIN, pinned=pinned)

        def program(recorder: Recorder) -> None:
            arrived: tuple[Mark, ...] = ()
            for number in range(CHAIN):
                stage = Stage("hand-off", number, 0, requests)
                made = recorder.run(Lane.DEVICE, stage, lambda: qkv.add_(1), arrived)
                recorder.run(Lane.TO_HOST, stage, lambda: qkv_on_host.copy_(qkv, non_blocking=True), (made,))
                asked = recorder.raise_flag(Lane.TO_HOST, flags[READY, number, :1])
                recorder.wait_for_flag(Lane.TO_DEVICE, flags[DONE, number, :1], asked)
                arrived = (
                    recorder.run(Lane.TO_DEVICE, stage, lambda: out.copy_(out_on_host, non_blocking=True)),
                )
            recorder.run(Lane.DEVICE, Stage("end", CHAIN, 0, requests), lambda: None, arrived)

        batch = RelayBatch(
            q=qkv_on_host[:, :_HEADS],
            k=qkv_on_host[:, _HEADS : _HEADS + 1],
            v=qkv_on_host[:, _HEADS + 1 :],
            out=out_on_host,
            block_tables=torch.arange(requests, dtype=torch.int32).unsqueeze(1),
            context_lens=torch.ones(requests, dtype=torch.int32),
            flags=flags,
        )
        if pinned:
            torch.cuda.synchronize(device)  # the lanes know nothing of what was done on this thread's stream
        for number in (1, 2):  # at once, and as a graph
            relay.start([batch], PATIENCE_S)
            start = time.perf_counter()
            try:
                self._runner.start(nbytes, program)
                self._runner.wait()
            except BaseException:
                relay.cancel()
                raise
            taken = time.perf_counter() - start
            attending = sum(step.end_ns - step.start_ns for step in relay.finish()) / 1e9
            if not torch.equal(out.cpu(), torch.full(out.shape, float(number * CHAIN))):
                raise RuntimeError(
                    "a hand-off between GPU and CPU lost data: the driver or the GPU is at fault"
                )
        self._runner.forget()
        return (taken - attending) / CHAIN
