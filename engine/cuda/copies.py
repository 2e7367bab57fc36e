"""Host memory that a GPU copies from and to, and small copies that nobody waits for until they are needed.

Copies are asked for as if the memory were pinned. Where it is not, CUDA lets the caller wait: until the copy
has ended, or until what is copied has been read.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from neo_desktop.engine.cuda.errors import is_lost
from neo_desktop.engine.cuda.waiting import wait_for_gpu
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.watchdog import DEFAULT_TIMEOUT


def host_memory(make: Callable[[bool], Tensor], device: torch.device) -> Tensor:
    """Make a tensor in host memory that is copied from and to a device: pinned, if the system pins it.

    Args:
        make: makes it; told whether to pin its memory.
        device: pinning is of use to GPUs only.
    """
    if device.type == "cuda" and fallbacks.level("host_memory") == "pinned":
        try:
            return make(True)
        except RuntimeError as error:  # no lack of the GPU's memory: of memory that may be pinned
            if is_lost(error):
                raise
            said = str(error).strip().partition("\n")[0]
            fallbacks.limit("host_memory", "pageable", f"memory cannot be pinned: {said}")
    return make(False)


def suits_graphs(on_host: Iterable[Tensor], device: torch.device) -> bool:
    """Return whether CUDA graphs of a device can copy from and to these: whether they are pinned."""
    return device.type == "cpu" or all(tensor.is_pinned() for tensor in on_host)


def upload(numbers: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Bring numbers to the device without waiting for what runs there."""
    if device.type != "cuda":
        return torch.as_tensor(numbers, dtype=dtype, device=device)
    on_host = torch.as_tensor(numbers, dtype=dtype)
    on_host = host_memory(lambda pin: on_host.pin_memory() if pin else on_host, device)
    return on_host.to(device, non_blocking=True)


def download(tensor: Tensor) -> Callable[[], Tensor]:
    """Start to bring a tensor to host memory; what is returned waits for it.

    It raises DeviceStalledError and DeviceLostError, see `wait_for_gpu`. A caller with much work before it on
    the stream should wait for that first, with a timeout of its own.
    """
    if tensor.device.type == "cpu":
        copy = tensor.clone()
        return lambda: copy
    on_host = host_memory(
        lambda pin: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin), tensor.device
    )
    on_host.copy_(tensor, non_blocking=True)
    arrived: torch.cuda.Event = torch.cuda.current_stream(tensor.device).record_event()

    def wait() -> Tensor:
        wait_for_gpu(arrived, DEFAULT_TIMEOUT.watch(), "a copy of results")
        return on_host

    return wait
