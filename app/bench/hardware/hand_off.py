"""What it takes to let the CPU do a step in between: there, and back again, on the engine's own lanes.

device   kernel |                          | kernel
to-host         |copy|
cpu                  |wait, compute|
to-device                          |copy|
"""

import time

import torch

from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.execute.lanes import Lanes
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.profiling.graph_hand_off import CHAIN


class HandOff:
    """Round trips on a device's lanes: CUDA streams and a thread; without a GPU threads alone."""

    def __init__(self, streams: Streams) -> None:
        self._device = streams.device
        self._lanes = Lanes.for_device(streams, None)

    def seconds(self, nbytes: int) -> float:
        """Seconds of one round trip with so many bytes each way.

        Raises:
            RuntimeError: what came back is not what was to be computed.
        """
        lanes, device = self._lanes, self._device
        tensor = torch.zeros(nbytes // 4, device=device)
        on_host = torch.empty(nbytes // 4, pin_memory=device.type == "cuda")

        def send() -> None:
            on_host.copy_(tensor, non_blocking=True)

        def compute() -> None:
            on_host[0] += 1

        def send_back() -> None:
            tensor.copy_(on_host, non_blocking=True)

        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for layer in range(CHAIN):
            tensor.add_(1)
            stage = Stage("hand-off", layer, 0, 1)
            sent = lanes.to_host.submit(stage, send, (lanes.device.mark(),))
            computed = lanes.cpu.submit(stage, compute, (sent,))
            lanes.device.wait(lanes.to_device.submit(stage, send_back, (computed,)))
        lanes.join()
        taken = time.perf_counter() - start
        if float(tensor[0]) != 2 * CHAIN or float(tensor[-1]) != CHAIN:
            raise RuntimeError("a hand-off between GPU and CPU lost data: the driver or the GPU is at fault")
        return taken / CHAIN

    def close(self) -> None:
        """End the threads."""
        self._lanes.close()
