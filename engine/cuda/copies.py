"""Host memory for GPU copies, small asynchronous copies, and waits for the GPU.

Callers request copies as if the host memory were pinned. With pageable memory, CUDA blocks the caller until
the copy has ended or until the source has been read.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from neo_desktop.engine.cuda.errors import DeviceStalledError, device_lost, is_device_lost, is_lost
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.watchdog import DEFAULT_TIMEOUT, Watchdog
from neo_desktop.native.relay import empty_flags


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


def host_empty(shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialised `host_memory`."""
    return host_memory(lambda pin: torch.empty(shape, dtype=dtype, pin_memory=pin), device)


def host_flags(num_turns: int, device: torch.device) -> Tensor:
    """Return `native.relay.empty_flags` in `host_memory`."""
    return host_memory(lambda pin: empty_flags(num_turns, pinned=pin), device)


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
    on_host = host_empty(tensor.shape, tensor.dtype, tensor.device)
    on_host.copy_(tensor, non_blocking=True)
    arrived: torch.cuda.Event = torch.cuda.current_stream(tensor.device).record_event()

    def wait() -> Tensor:
        wait_for_gpu(arrived.query, DEFAULT_TIMEOUT.watch(), "a copy of results")
        return on_host

    return wait


class HostBuffer:
    """A host buffer for transfers, pinned if possible; it grows and never shrinks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the memory as a tensor. All views share it, so only one view may be in use at a time."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > len(self._bytes):
            self._bytes = host_empty(max(num_bytes, 2 * len(self._bytes)), torch.uint8, self._device)
        return self._bytes[:num_bytes].view(dtype).view(shape)


def wait_for_gpu(
    has_ended: Callable[[], bool], watch: Watchdog, what: str = "its work", timeout: float = 1.0
) -> None:
    """Block until work on a stream, or before an event, has ended.

    Args:
        has_ended: `query` of the stream or event.
        what: Name of the work, for the error message.
        timeout: In units of the watchdog's.

    Raises:
        DeviceStalledError: The watchdog saw no progress for too long. The GPU cannot be stopped, so all
            memory that it reads and writes must stay allocated.
        DeviceLostError: The GPU is lost to this process.
    """
    try:
        is_in_time = watch.wait_until(has_ended, timeout)
    except RuntimeError as error:
        if is_device_lost(error):
            raise device_lost(error) from error
        raise
    if not is_in_time:
        raise DeviceStalledError(
            f"the GPU did not end {what} {watch.words}; it no longer answers, and the engine must be started "
            "again"
        )
