"""The parts of CUDA that a GPU slice needs: driver functions, cuBLAS, and torch's current streams."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

GREEN_CONTEXT, DESCRIPTOR, FIRST_STREAM = 0xABC, 0xDE5C, 0x1000
SM_RESOURCE = object()


def accelerator_error(text: str, code: int) -> Exception:
    """Return torch's error for a failed call of CUDA's runtime."""
    error = torch.AcceleratorError(text)
    error.error_code = code  # type: ignore[attr-defined]
    return error


def value(argument: Any) -> int:
    """Return a number, unwrapped from its C type if necessary."""
    return int(getattr(argument, "value", argument) or 0)


def sms(count: int) -> SimpleNamespace:
    """Return a resource with `count` SMs."""
    return SimpleNamespace(sm=SimpleNamespace(smCount=count))


class FakeDriver:
    """cuda.bindings.driver on a GPU that allocates SMs in groups; functions in `fail` return that error.

    `calls` holds the functions' names in order, `streams` the handles made, `open_contexts` the number of
    contexts not yet destroyed.
    """

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=SM_RESOURCE)

    def __init__(self, total_sms: int = 132, group: int = 8, without: tuple[str, ...] = ()) -> None:
        self.total_sms, self.group, self._without = total_sms, group, without
        self.fail: dict[str, int] = {}
        self.calls: list[str] = []
        self.streams: list[int] = []
        self.open_contexts = 0
        self.described_sms = 0  # SM count of the last descriptor
        self.context_sms = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def function(*arguments: Any) -> tuple[Any, ...]:
            if name in self._without:
                raise RuntimeError(f"function {name} is not found")
            self.calls.append(name)
            if name in self.fail:
                return self.fail[name], None
            return 0, *getattr(self, f"_{name}")(*arguments)

        return function

    def _cuInit(self, flags: int) -> tuple[()]:  # noqa: N802
        return ()

    def _cuDeviceGet(self, ordinal: int) -> tuple[int]:  # noqa: N802
        return (70 + ordinal,)

    def _cuDeviceGetDevResource(self, device: int, kind: object) -> tuple[Any]:  # noqa: N802
        assert device >= 70
        assert kind is SM_RESOURCE
        return (sms(self.total_sms),)

    def _cuDevSmResourceSplitByCount(  # noqa: N802
        self, num_groups: int, whole: Any, flags: int, least: int
    ) -> tuple[list[Any], int, Any]:
        assert (num_groups, flags, whole.sm.smCount) == (1, 0, self.total_sms)
        given = -(-least // self.group) * self.group
        if given > self.total_sms:
            return [], 0, sms(self.total_sms)
        return [sms(given)], 1, sms(self.total_sms - given)

    def _cuDevResourceGenerateDesc(self, resources: list[Any], count: int) -> tuple[int]:  # noqa: N802
        assert count == len(resources) == 1
        self.described_sms = resources[0].sm.smCount
        return (DESCRIPTOR,)

    def _cuGreenCtxCreate(self, descriptor: int, device: int, flags: int) -> tuple[int]:  # noqa: N802
        assert (descriptor, flags) == (DESCRIPTOR, 1)
        assert device >= 70
        self.context_sms = self.described_sms
        self.open_contexts += 1
        return (GREEN_CONTEXT,)

    def _cuGreenCtxStreamCreate(self, context: int, flags: int, priority: int) -> tuple[int]:  # noqa: N802
        assert (context, flags, priority) == (GREEN_CONTEXT, 1, 0)
        self.streams.append(FIRST_STREAM + len(self.streams))
        return (self.streams[-1],)

    def _cuGreenCtxDestroy(self, context: int) -> tuple[()]:  # noqa: N802
        assert context == GREEN_CONTEXT
        self.open_contexts -= 1
        return ()


class FakeCublas:
    """SM count targets by handle."""

    def __init__(self) -> None:
        self.targets: dict[int, int] = {}

    def cublasGetSmCountTarget(self, handle: Any, count: Any) -> int:  # noqa: N802
        count.contents.value = self.targets.get(value(handle), 0)
        return 0

    def cublasSetSmCountTarget(self, handle: Any, count: Any) -> int:  # noqa: N802
        self.targets[value(handle)] = value(count)
        return 0


class FakeStream:
    """A torch stream that records the streams it waited for."""

    def __init__(self, handle: int, device: torch.device | None = None) -> None:
        self.handle, self.device = handle, device
        self.waited_for: list[FakeStream] = []

    def wait_stream(self, other: "FakeStream") -> None:
        self.waited_for.append(other)

    def query(self) -> bool:
        return True

    def record_event(self) -> "FakeStream":
        return self

    def wait_event(self, event: "FakeStream") -> None:
        self.waited_for.append(event)


class FakeTorchCuda:
    """Current streams and cuBLAS handles per thread, as in torch."""

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
    """CPU `Streams` that know if a thread is inside `on_device`."""

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

    @contextmanager
    def on_device(self) -> Iterator[None]:
        self._of_thread.depth = getattr(self._of_thread, "depth", 0) + 1
        try:
            yield
        finally:
            self._of_thread.depth -= 1
