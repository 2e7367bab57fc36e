"""Small copies between host and device that nobody waits for until the numbers are needed."""

from collections.abc import Callable

import torch
from torch import Tensor

from neo_desktop.engine.cuda.waiting import wait_for_gpu
from neo_desktop.engine.waiting import DEFAULT_PATIENCE


def upload(numbers: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Bring numbers to the device without waiting for what runs there."""
    if device.type != "cuda":
        return torch.as_tensor(numbers, dtype=dtype, device=device)
    return torch.as_tensor(numbers, dtype=dtype).pin_memory().to(device, non_blocking=True)


def download(tensor: Tensor) -> Callable[[], Tensor]:
    """Start to bring a tensor to host memory; what is returned waits for it.

    It raises DeviceStalledError and DeviceLostError, see `wait_for_gpu`. Whoever has much work before it on
    the stream waits for that with a patience of its own.
    """
    if tensor.device.type == "cpu":
        return lambda: tensor
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    on_host.copy_(tensor, non_blocking=True)
    arrived: torch.cuda.Event = torch.cuda.current_stream(tensor.device).record_event()

    def wait() -> Tensor:
        wait_for_gpu(arrived, DEFAULT_PATIENCE.watch(), "a copy of results")
        return on_host

    return wait
