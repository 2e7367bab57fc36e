"""Host memory for GPU copies, and small asynchronous copies.

Callers request copies as if the host memory were pinned. With pageable memory, CUDA blocks the caller until
the copy has ended or until the source has been read.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from neo_desktop.engine.cuda.errors import is_lost
from neo_desktop.engine.cuda.waiting import wait_for_gpu
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.watchdog import DEFAULT_TIMEOUT


def host_memory(make: Callable[[bool], Tensor], device: torch.device) -> Tensor:
    """Make a tensor in host memory for copies; pin it if a GPU copies and the system allows.

    Args:
        make: makes the tensor, pinned if its argument is True.
    """
    if device.type == "cuda" and fallbacks.level("host_memory") == "pinned":
        try:
            return make(True)
        except RuntimeError as error:  # out of pinnable host memory, not of GPU memory
            if is_lost(error):
                raise
            said = str(error).strip().partition("\n")[0]
            fallbacks.limit("host_memory", "pageable", f"memory cannot be pinned: {said}")
    return make(False)


def suits_graphs(on_host: Iterable[Tensor], device: torch.device) -> bool:
    """Return True if CUDA graphs of a device can copy from and to these tensors: a GPU needs them pinned.

    A tensor without elements has no memory, which CUDA reports as not pinned.
    """
    return device.type == "cpu" or all(tensor.is_pinned() for tensor in on_host if tensor.numel())


def upload(numbers: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to the device without waiting for its current work."""
    if device.type != "cuda":
        return torch.as_tensor(numbers, dtype=dtype, device=device)
    on_host = torch.as_tensor(numbers, dtype=dtype)
    on_host = host_memory(lambda pin: on_host.pin_memory() if pin else on_host, device)
    return on_host.to(device, non_blocking=True)


def download(tensor: Tensor) -> Callable[[], Tensor]:
    """Start a copy of a tensor to host memory and return a function that waits for the copy.

    The function raises DeviceStalledError and DeviceLostError, see `wait_for_gpu`. If much work is queued on
    the stream, the caller should first wait for that work with a timeout of its own.
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
