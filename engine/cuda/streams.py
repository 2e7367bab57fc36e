"""The one tier that CUDA streams come from.

Work on a GPU goes to the current stream of the thread. So all such work is started inside
`Streams.on_device()`, and streams to work beside that come from `Streams.stream()`. Then all of it
stays in the slice of the GPU that was asked for; torch's own streams, the default one included, do not.
CUDA graphs must be captured on such a stream, too (`torch.cuda.graph(graph, stream=...)`).

Who does: loading (`load`), the KV pools (`take_memory`), measuring (`load_or_profile`), the executor
(`Executor.start` and what it returns, and the streams of its lanes), and the self-test, around its suites.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Protocol

import torch

from neo_desktop.engine.cuda.driver import (
    Driver,
    GreenContext,
    Library,
    cublas_library,
    cublas_lt_sm_target,
    cublas_sm_target,
    open_driver,
)

logger = logging.getLogger(__name__)

_MOST_STREAMS = 32  # beside the main one, then they are shared; torch has as many


class Streams(Protocol):
    """What work on a model's device runs on."""

    @property
    def device(self) -> torch.device:
        """The device."""

    @property
    def sms(self) -> int | None:
        """Multiprocessors that the work has; None: the device is no GPU."""

    @property
    def note(self) -> str | None:
        """What people should know; None: the work has the whole device."""

    def stream(self) -> torch.cuda.Stream:
        """Return a CUDA stream beside the main one."""

    def on_device(self) -> AbstractContextManager[None]:
        """Let this thread's work on the device go to the main stream, in order with what was before."""


class WholeDevice:
    """A GPU with torch's own streams, or a CPU, which has none."""

    note = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def sms(self) -> int | None:
        if self.device.type != "cuda":
            return None
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def on_device(self) -> AbstractContextManager[None]:
        """See `Streams`: the thread's current stream stays what it is."""
        return nullcontext()


class GpuSlice:
    """Some of a GPU's multiprocessors: a big card stands for a small one.

    Its streams live as long as the process: torch's allocators go on referring to streams on which memory
    was used, and to destroy one would be an error in whatever comes next.

    Args:
        device: a CUDA device, with its number.
        num_sms: multiprocessors, see `GreenContext`.
        driver: see `open_driver`.
        cublas: torch's.

    Raises:
        ValueError, RuntimeError: see `GreenContext`.
    """

    def __init__(self, device: torch.device, num_sms: int, driver: Driver, cublas: Library) -> None:
        self.device = device
        self._cublas = cublas
        self._context = GreenContext(driver, device.index, num_sms)
        self._lock = threading.Lock()
        self._streams: list[torch.cuda.Stream] = []
        self._num_asked = 0
        try:
            self._main = self._new()
        except BaseException:
            self._context.close()
            raise

    @property
    def sms(self) -> int:
        return self._context.num_sms

    @property
    def note(self) -> str:
        return f"All GPU work runs on {self.sms} of the GPU's {self._context.total_sms} multiprocessors."

    def stream(self) -> torch.cuda.Stream:
        with self._lock:
            number = self._num_asked % _MOST_STREAMS
            self._num_asked += 1
            if number == len(self._streams):
                self._streams.append(self._new())
            return self._streams[number]

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """See `Streams`; what comes after the block waits for what was started in it."""
        before = torch.cuda.current_stream(self.device)
        if before == self._main:
            yield
            return
        self._main.wait_stream(before)
        with (
            torch.cuda.stream(self._main),
            cublas_sm_target(self._cublas, self.sms),
            cublas_lt_sm_target(self.sms, self._context.total_sms),
        ):
            try:
                yield
            finally:
                before.wait_stream(self._main)

    def _new(self) -> torch.cuda.Stream:
        return torch.cuda.ExternalStream(self._context.stream(), device=self.device)  # type: ignore[no-untyped-call]


def open_streams(device: torch.device, gpu_slice: int | None = None) -> Streams:
    """Return the streams of a device, or of a slice of it; the same slice for the same arguments.

    Args:
        gpu_slice: multiprocessors; None: the whole device.

    Raises:
        ValueError: the slice is none that this device can have.
        RuntimeError: the driver cannot make slices.
    """
    if gpu_slice is None:
        return WholeDevice(device)
    if gpu_slice < 1:
        raise ValueError(f"a slice of the GPU has at least 1 multiprocessor, not {gpu_slice}")
    if device.type != "cuda":
        raise ValueError(
            "--gpu-slice needs an NVIDIA GPU that torch can use, but the model would run on the CPU: leave "
            "it out; what is wrong with a GPU that should be there, neo-desktop info says"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    return _open_slice(index, gpu_slice)


@cache
def _open_slice(index: int, num_sms: int) -> GpuSlice:
    device = torch.device("cuda", index)
    torch.empty(1, device=device)  # makes the primary context, which a green one belongs to
    found = GpuSlice(device, num_sms, open_driver(), cublas_library())
    if found.sms != num_sms:
        logger.warning(
            "the slice of the GPU has %d multiprocessors instead of %d: this GPU gives them in groups",
            found.sms,
            num_sms,
        )
    return found
