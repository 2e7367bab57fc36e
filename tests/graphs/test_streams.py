"""Programs on CUDA streams, with streams and a driver that only write down what they are told."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from neo_desktop.engine.cuda import driver
from neo_desktop.engine.cuda.errors import StreamMemoryError
from neo_desktop.engine.cuda.workspaces import clear_workspaces
from neo_desktop.engine.execute.graphs import streams
from neo_desktop.engine.execute.graphs.streams import CudaRunner, Lane, Recorder, check_flags
from neo_desktop.engine.execute.timeline import Stage

STAGE = Stage("work", 0, 0, 1)


@dataclass
class FakeGpu:
    """Keeps the order of everything, and which streams wait for which events."""

    log: list[tuple[Any, ...]] = field(default_factory=list)
    current: list[str] = field(default_factory=lambda: ["default"])
    is_full: bool = False
    refuses: bool = False
    refuses_capture: bool = False
    loses_replay: bool = False
    is_capturing: bool = False
    written: torch.Tensor | None = None  # the flag that memory operations really write

    def stream(self, name: str) -> SimpleNamespace:
        def record_event() -> tuple[str, int]:
            """Return which of the stream's events it is."""
            event = (name, self.log.count(("record", name)))
            self.log.append(("record", name))
            return event

        return SimpleNamespace(
            cuda_stream=list(Lane).index(Lane(name)) + 1,
            name=name,
            record_event=record_event,
            wait_event=lambda event: self.log.append(("wait", name, event)),
            query=lambda: self.log.append(("synchronize", name)) is None,
            device="cuda",
        )

    @contextmanager
    def on(self, stream: SimpleNamespace) -> Iterator[None]:
        self.current.append(stream.name)
        yield
        self.current.pop()

    def work(self, what: str) -> None:
        self.log.append(("work", what, self.current[-1]))

    def graph(self) -> SimpleNamespace:
        def begin(pool: object, capture_error_mode: str) -> None:
            self.is_capturing = True
            self.log.append(("begin capture", self.current[-1], capture_error_mode))

        def end() -> None:
            self.is_capturing = False
            self.log.append(("end capture", self.current[-1]))
            if self.is_full:
                raise torch.OutOfMemoryError("no room")

        def replay() -> None:
            self.log.append(("replay", self.current[-1]))
            if self.written is not None and not self.loses_replay:
                self.written.fill_(1)

        return SimpleNamespace(
            capture_begin=begin,
            capture_end=end,
            replay=replay,
        )

    def memory_operation(self, name: str) -> Any:
        def call(stream: int, address: int, value: int, flags: int) -> tuple[int]:
            self.log.append((name, list(Lane)[stream - 1].value, address, value, flags))
            if self.is_capturing and self.refuses_capture:
                return (900,)
            if self.written is not None and not self.is_capturing:
                self.written.fill_(1)
            return (801 if self.refuses else 0,)

        return call


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    functions = SimpleNamespace(
        cuStreamWriteValue32=fake.memory_operation("write"),
        cuStreamWaitValue32=fake.memory_operation("wait for"),
    )
    monkeypatch.setattr(driver, "open_driver", lambda: functions)
    monkeypatch.setattr(torch.cuda, "stream", fake.on)
    callers = SimpleNamespace(wait_stream=lambda other: fake.log.append(("caller waits for", other.name)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: callers)
    monkeypatch.setattr(torch.cuda, "Event", tuple)  # what the fake's events are
    monkeypatch.setattr(torch.cuda, "CUDAGraph", fake.graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    return fake


def runner(gpu: FakeGpu) -> CudaRunner:
    return CudaRunner({lane: gpu.stream(lane) for lane in Lane}, None)  # type: ignore[misc]


def carry_out(runs: CudaRunner, key: str, program: streams.Program) -> None:
    runs.start(key, program)
    runs.wait()


def hand_over(gpu: FakeGpu, flag: torch.Tensor) -> streams.Program:
    def program(recorder: Recorder) -> None:
        made = recorder.run(Lane.DEVICE, STAGE, lambda: gpu.work("qkv"))
        recorder.run(Lane.TO_HOST, STAGE, lambda: gpu.work("send"), (made,))
        asked = recorder.raise_flag(Lane.TO_HOST, flag[:1])
        recorder.wait_for_flag(Lane.TO_DEVICE, flag[1:], asked)
        arrived = recorder.run(Lane.TO_DEVICE, STAGE, lambda: gpu.work("fetch"))
        recorder.run(Lane.DEVICE, STAGE, lambda: gpu.work("output"), (arrived,))

    return program


def test_work_and_flags_go_to_their_streams_between_the_events(gpu: FakeGpu) -> None:
    flag = torch.zeros(2, dtype=torch.int32)
    runner(gpu).start("key", hand_over(gpu, flag))
    first = gpu.log[: gpu.log.index(("synchronize", "device"))]
    assert (
        [entry for entry in first if entry[0] != "record"]
        == [
            (
                "wait",
                "to-host",
                ("device", 0),
            ),  # forked from the device's stream, so that a capture includes it
            ("wait", "to-device", ("device", 0)),
            ("work", "qkv", "device"),
            ("wait", "to-host", ("device", 1)),
            ("work", "send", "to-host"),
            ("write", "to-host", flag.data_ptr(), 1, 0),
            ("wait", "to-device", ("to-host", 1)),  # the answer comes after the question, for CUDA, too
            ("wait for", "to-device", flag[1:].data_ptr(), 1, 1),
            ("work", "fetch", "to-device"),
            ("wait", "device", ("to-device", 0)),
            ("work", "output", "device"),
            ("wait", "device", ("to-host", 2)),  # and joined to it
            ("wait", "device", ("to-device", 1)),
        ]
    )


def test_a_program_is_captured_once_and_launched_from_then_on(gpu: FakeGpu) -> None:
    runs = runner(gpu)
    program = hand_over(gpu, torch.zeros(2, dtype=torch.int32))
    carry_out(runs, "key", program)
    names = [entry[0] for entry in gpu.log]
    # At once first: that compiles the kernels, which a capture must not.
    assert names.index("synchronize") < names.index("begin capture")
    assert names.count("work") == 2 * 4
    assert ("begin capture", "device", "thread_local") in gpu.log
    gpu.log.clear()
    runs.start("key", program)
    assert gpu.log == [("replay", "device"), ("caller waits for", "device")]
    runs.wait()
    assert gpu.log[-1] == ("synchronize", "device")
    gpu.log.clear()
    carry_out(runs, "another", program)
    assert ("end capture", "device") in gpu.log
    runs.forget()
    gpu.log.clear()
    carry_out(runs, "key", program)
    assert ("replay", "device") not in gpu.log


def is_replayed(gpu: FakeGpu, runs: CudaRunner, key: str) -> bool:
    gpu.log.clear()
    carry_out(runs, key, hand_over(gpu, torch.zeros(2, dtype=torch.int32)))
    return ("replay", "device") in gpu.log


def test_no_graph_outlives_another_of_its_stream(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first that goes, torch frees the memory in which cuBLAS works in all graphs of the stream."""
    monkeypatch.setattr(streams, "MAX_GRAPHS", 2)
    runs = runner(gpu)
    assert [is_replayed(gpu, runs, key) for key in ("a", "b", "a", "c")] == [False, False, True, False]
    assert [is_replayed(gpu, runs, key) for key in ("c", "a", "b")] == [True, False, False]

    gpu.is_full = True
    with pytest.raises(torch.OutOfMemoryError):
        is_replayed(gpu, runs, "d")
    gpu.is_full = False
    assert not is_replayed(gpu, runs, "b")


def test_memory_that_cublas_works_in_is_cleared_only_while_there_is_no_graph(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clear() -> bool:
        gpu.log.clear()
        is_cleared = clear_workspaces(torch.device("cuda"))
        assert gpu.log == [("synchronize",)] + [("clear",)] * is_cleared  # not while it is worked in
        return is_cleared

    gc.collect()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: gpu.log.append(("synchronize",)))
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: gpu.log.append(("clear",)), raising=False
    )
    assert clear()
    runs, others = runner(gpu), runner(gpu)
    is_replayed(gpu, runs, "a")
    is_replayed(gpu, others, "a")
    assert not clear()
    runs.forget()
    assert not clear()
    del others
    gc.collect()
    assert clear()


def test_a_torch_that_cannot_clear_cublas_memory_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces", raising=False)
    assert not clear_workspaces(torch.device("cuda"))


def test_a_capture_that_finds_no_room_leaves_nothing_behind(gpu: FakeGpu) -> None:
    runs = runner(gpu)
    program = hand_over(gpu, torch.zeros(2, dtype=torch.int32))
    gpu.is_full = True
    with pytest.raises(torch.OutOfMemoryError):
        carry_out(runs, "key", program)
    gpu.is_full = False
    gpu.log.clear()
    carry_out(runs, "key", program)
    assert ("replay", "device") not in gpu.log


def test_a_capture_that_breaks_tells_why_and_ends(gpu: FakeGpu) -> None:
    runs = runner(gpu)
    is_captured = False

    def program(recorder: Recorder) -> None:
        if is_captured:
            gpu.is_full = True  # ending a broken capture is an error, too
            raise ValueError("broken")

    def mark(what: object) -> None:
        nonlocal is_captured
        is_captured = True

    recorded = runs._record
    runs._record = lambda p: (recorded(p), mark(p))[0]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="broken"):
        carry_out(runs, "key", program)
    assert gpu.log[-1] == ("end capture", "device")
    runs.settle()
    assert [entry for entry in gpu.log if entry[0] == "synchronize"][-3:] == [
        ("synchronize", lane) for lane in Lane
    ]


def test_a_driver_without_memory_operations_is_found_out_at_the_start(gpu: FakeGpu) -> None:
    gpu.refuses = True
    flag = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(StreamMemoryError, match="cuStreamWriteValue32 failed with CUDA driver error 801"):
        check_flags(runner(gpu), flag)
    gpu.refuses = False
    with pytest.raises(StreamMemoryError, match="at once did not arrive"):
        check_flags(runner(gpu), flag)


def test_memory_operations_that_only_a_capture_refuses_are_found_out_too(gpu: FakeGpu) -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    gpu.written = flag
    check_flags(runner(gpu), flag)
    gpu.refuses_capture = True
    with pytest.raises(StreamMemoryError, match="cuStreamWriteValue32 failed with CUDA driver error 900"):
        check_flags(runner(gpu), flag)
    gpu.refuses_capture, gpu.loses_replay = False, True
    with pytest.raises(StreamMemoryError, match="by a graph did not arrive"):
        check_flags(runner(gpu), flag)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_streams_raise_flags_and_wait_for_them() -> None:
    runs = CudaRunner({lane: torch.cuda.Stream() for lane in Lane}, None)  # type: ignore[no-untyped-call]
    check_flags(runs, torch.ones(1, dtype=torch.int32).pin_memory())
