"""As much of CUDA as a slice of a GPU needs: the driver's functions, cuBLAS, and torch's idea of streams."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

HEADER_BYTES = 96  # of CUdevResource: the number of SMs lies behind them
GREEN_CONTEXT, DESCRIPTOR, FIRST_STREAM = 0xABC, 0xDE5C, 0x1000


def value(argument: Any) -> int:
    """A number, whether or not it is wrapped for C."""
    return int(getattr(argument, "value", argument) or 0)


def sms_of(resource: Any) -> int:
    """The number of SMs in a resource that is pointed to, read as the driver's header says."""
    raw = ctypes.string_at(ctypes.addressof(resource.contents), HEADER_BYTES + 4)
    return int.from_bytes(raw[HEADER_BYTES:], "little")


def set_sms(resource: Any, count: int) -> None:
    address = ctypes.addressof(resource.contents)
    ctypes.memmove(address + HEADER_BYTES, count.to_bytes(4, "little"), 4)


class FakeDriver:
    """libcuda before a GPU that gives its SMs in groups; functions in `fail` return that error.

    `calls` are the names of the functions in order; `streams` the handles made; `open_contexts` what was not
    destroyed.
    """

    def __init__(self, total_sms: int = 132, group: int = 8, without: tuple[str, ...] = ()) -> None:
        self.total_sms, self.group, self._without = total_sms, group, without
        self.fail: dict[str, int] = {}
        self.calls: list[str] = []
        self.streams: list[int] = []
        self.open_contexts = 0
        self.described_sms = 0  # what the last descriptor stands for
        self.context_sms = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu") or name in self._without:
            raise AttributeError(name)

        def function(*arguments: Any) -> int:
            self.calls.append(name)
            return self.fail.get(name) or getattr(self, f"_{name}")(*arguments)

        return function

    def _cuInit(self, flags: int) -> int:  # noqa: N802
        return 0

    def _cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device.contents.value = 70 + ordinal
        return 0

    def _cuDeviceGetDevResource(self, device: Any, resource: Any, kind: int) -> int:  # noqa: N802
        assert value(device) >= 70
        assert kind == 1
        set_sms(resource, self.total_sms)
        return 0

    def _cuDevSmResourceSplitByCount(  # noqa: N802
        self, result: Any, groups: Any, whole: Any, rest: Any, flags: int, least: int
    ) -> int:
        assert flags == 0
        assert groups.contents.value == 1
        assert sms_of(whole) == self.total_sms
        given = -(-least // self.group) * self.group
        if given > self.total_sms:
            groups.contents.value = 0
            return 0
        set_sms(result, given)
        set_sms(rest, self.total_sms - given)
        return 0

    def _cuDevResourceGenerateDesc(self, descriptor: Any, resources: Any, count: int) -> int:  # noqa: N802
        assert count == 1
        descriptor.contents.value = DESCRIPTOR
        self.described_sms = sms_of(resources)
        return 0

    def _cuGreenCtxCreate(self, context: Any, descriptor: Any, device: Any, flags: int) -> int:  # noqa: N802
        assert (value(descriptor), flags) == (DESCRIPTOR, 1)
        assert value(device) >= 70
        context.contents.value = GREEN_CONTEXT
        self.context_sms = self.described_sms
        self.open_contexts += 1
        return 0

    def _cuGreenCtxStreamCreate(self, stream: Any, context: Any, flags: int, priority: int) -> int:  # noqa: N802
        assert (value(context), flags, priority) == (GREEN_CONTEXT, 1, 0)
        self.streams.append(FIRST_STREAM + len(self.streams))
        stream.contents.value = self.streams[-1]
        return 0

    def _cuGreenCtxDestroy(self, context: Any) -> int:  # noqa: N802
        assert value(context) == GREEN_CONTEXT
        self.open_contexts -= 1
        return 0


class FakeCublas:
    """The SM counts that were set, by handle."""

    def __init__(self) -> None:
        self.targets: dict[int, int] = {}

    def cublasGetSmCountTarget(self, handle: Any, count: Any) -> int:  # noqa: N802
        count.contents.value = self.targets.get(value(handle), 0)
        return 0

    def cublasSetSmCountTarget(self, handle: Any, count: Any) -> int:  # noqa: N802
        self.targets[value(handle)] = value(count)
        return 0


class FakeStream:
    """What torch knows of a stream, and whom it waited for."""

    def __init__(self, handle: int, device: torch.device | None = None) -> None:
        self.handle, self.device = handle, device
        self.waited_for: list[FakeStream] = []

    def wait_stream(self, other: "FakeStream") -> None:
        self.waited_for.append(other)

    def query(self) -> bool:
        return True


class FakeTorchCuda:
    """Each thread has its current stream and its cuBLAS handle, as in torch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.default = FakeStream(0)
        self._of_thread = threading.local()
        monkeypatch.setattr(torch.cuda, "ExternalStream", FakeStream)
        monkeypatch.setattr(torch.cuda, "Stream", self.refuse)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._use)
        monkeypatch.setattr(torch.cuda, "current_blas_handle", threading.get_ident)

    @property
    def current(self) -> FakeStream:
        found: FakeStream = getattr(self._of_thread, "stream", self.default)
        return found

    @contextmanager
    def _use(self, stream: FakeStream) -> Iterator[None]:
        before, self._of_thread.stream = self.current, stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    @staticmethod
    def refuse(*_: object) -> None:
        raise AssertionError("torch made a stream of its own: its work would be outside the slice")


class RecordedStreams:
    """`Streams` of a CPU that know whether a thread is inside `on_device`."""

    note = "a note"
    sms = 8

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._of_thread = threading.local()

    @property
    def is_inside(self) -> bool:
        return getattr(self._of_thread, "depth", 0) > 0

    def stream(self) -> torch.cuda.Stream:
        raise AssertionError("a CPU has no streams")

    def timing_stream(self, number: int = 0) -> torch.cuda.Stream:
        raise AssertionError("a CPU has no streams")

    @contextmanager
    def on_device(self) -> Iterator[None]:
        self._of_thread.depth = getattr(self._of_thread, "depth", 0) + 1
        try:
            yield
        finally:
            self._of_thread.depth -= 1
