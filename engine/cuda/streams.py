"""The only source of CUDA streams.

GPU work runs on the thread's current stream. So callers start all GPU work inside `Streams.on_device()`, and
take further streams from `Streams.stream()`. Then all work stays in the requested slice of the GPU. torch's
own streams, the default one included, ignore the slice. CUDA graphs need a capture stream from here as well
(`torch.cuda.graph(graph, stream=...)`).

Callers: loading (`load`), the KV pools (`take_memory`), profiling (`load_or_profile`), the executor
(`Executor.start`, the functions that it returns, its lanes' streams), and the self-test around its suites.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

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

_MOST_STREAMS = 32  # beside the main one, further callers share them; torch has the same limit


class Streams:
    """The streams of a model's device: torch's own on a whole GPU, none on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def sms(self) -> int | None:
        """Number of usable multiprocessors; None: the device is no GPU."""
        if self.device.type != "cuda":
            return None
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    @property
    def note(self) -> str | None:
        """A note for users; None: the work has the whole device."""
        return None

    def stream(self) -> torch.cuda.Stream:
        """Return a CUDA stream beside the main one."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def on_device(self) -> AbstractContextManager[None]:
        """Send this thread's device work to the main stream, in order after its earlier work."""
        return nullcontext()


class GpuSlice(Streams):
    """A subset of a GPU's multiprocessors: a big card imitates a small one.

    The streams live as long as the process. torch's allocators keep references to streams that used memory,
    so later calls would fail if a stream were destroyed.

    Args:
        device: A CUDA device with its index.
    """

    def __init__(self, device: torch.device, num_sms: int, driver: Driver, cublas: Library) -> None:
        super().__init__(device)
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
        """Send device work to the slice's main stream; work after the block waits for work inside it."""
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
    """Return the streams of a device or of a slice; equal arguments return the same slice.

    Args:
        gpu_slice: Number of multiprocessors; None: the whole device.

    Raises:
        ValueError: The device cannot have this slice.
        RuntimeError: The driver cannot make slices.
    """
    if gpu_slice is None:
        return Streams(device)
    if gpu_slice < 1:
        raise ValueError(f"a slice of the GPU has at least 1 multiprocessor, not {gpu_slice}")
    if device.type != "cuda":
        raise ValueError(
            "--gpu-slice needs an NVIDIA GPU that torch can use, but the model would run on the CPU. Leave "
            "--gpu-slice out; if this computer has an NVIDIA GPU, run: neo-desktop info"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    return _open_slice(index, gpu_slice)


@cache
def _open_slice(index: int, num_sms: int) -> GpuSlice:
    device = torch.device("cuda", index)
    torch.empty(1, device=device)  # creates the primary context, which a green context needs
    made = GpuSlice(device, num_sms, open_driver(), cublas_library())
    if made.sms != num_sms:
        logger.warning(
            "the slice of the GPU has %d multiprocessors instead of %d: this GPU gives them in groups",
            made.sms,
            num_sms,
        )
    return made


def own_stream(streams: Streams) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that makes contexts for a thread's device work, in a stream of its own.

    The work has ended after the context.
    """
    if streams.device.type != "cuda":
        return nullcontext
    stream = streams.stream()

    @contextmanager
    def on_stream() -> Iterator[None]:
        with torch.cuda.stream(stream):
            yield
            stream.synchronize()

    return on_stream
