"""Programs on a GPU, with streams, graphs and a driver that only record their calls."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from neo_desktop.engine.cuda import driver
from neo_desktop.engine.cuda.errors import StreamMemoryError
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.execute.backend import StreamBackend
from neo_desktop.engine.execute.build import check_flags
from neo_desktop.engine.execute.lane import HostTask, Lane, Launcher, Step
from neo_desktop.engine.execute.lanes import TOLD_BY
from neo_desktop.engine.execute.timeline import Stage

LANES = [lane for lane in Lane if lane not in TOLD_BY]
STAGE = Stage("work", 0, 0, 1)


class FakeEvent(NamedTuple):
    """A recorded event: its stream, and its number on that stream."""

    stream: str
    number: int

    def query(self) -> bool:
        return True


@dataclass
class FakeGpu:
    """GPU stand-in that logs all calls in order, with the events that streams wait for."""

    log: list[tuple[Any, ...]] = field(default_factory=list)
    current: list[str] = field(default_factory=lambda: ["default"])
    is_full: bool = False
    refuses: bool = False
    refuses_capture: bool = False
    loses_replay: bool = False
    is_capturing: bool = False
    waits_for: torch.Tensor | None = None  # a flag that all work waits for
    written: torch.Tensor | None = None  # the flag that memory operations write in reality

    def stream(self, name: str) -> SimpleNamespace:
        def record_event() -> FakeEvent:
            """Return the stream's next event."""
            event = FakeEvent(name, self.log.count(("record", name)))
            self.log.append(("record", name))
            return event

        return SimpleNamespace(
            cuda_stream=LANES.index(Lane(name)) + 1,
            name=name,
            record_event=record_event,
            wait_event=lambda event: self.log.append(("wait", name, event)),
            query=lambda: self.log.append(("synchronize", name)) is None and self.has_ended(),
            wait_stream=lambda other: self.log.append(("wait for stream", name, other.name)),
            device=torch.device("cuda", 0),
        )

    @contextmanager
    def on(self, stream: SimpleNamespace) -> Iterator[None]:
        self.current.append(stream.name)
        yield
        self.current.pop()

    def has_ended(self) -> bool:
        return self.waits_for is None or bool(self.waits_for.all())

    def names(self) -> list[str]:
        return [entry[0] for entry in self.log]

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
            self.log.append((name, LANES[stream - 1].value, address, value, flags))
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
    callers = SimpleNamespace(wait_stream=lambda other: None, name="caller")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: callers)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", fake.graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *_, name=name: fake.log.append((name,)), raising=False)
    return fake


def backend(gpu: FakeGpu) -> StreamBackend:
    names = iter(LANES)
    streams = SimpleNamespace(stream=lambda: gpu.stream(next(names)), on_device=nullcontext)
    return StreamBackend(streams, None)  # type: ignore[arg-type]


Record = Callable[[Launcher], None]


class FixedProgram:
    def __init__(self, key: str, *records: Record) -> None:
        self.key = key
        self._records = records

    def steps(self) -> list[Step]:
        return [Step(each, is_capturable=number % 2 == 0) for number, each in enumerate(self._records)]


def carry_out(runs: StreamBackend, key: str, *records: Record, with_graphs: bool = True) -> bool:
    is_first = runs.start(FixedProgram(key, *records), with_flags=True, with_graphs=with_graphs)
    runs.wait()
    return is_first


def offload_buffers(gpu: FakeGpu, flags: torch.Tensor) -> Record:
    def program(launcher: Launcher) -> None:
        made = launcher.run(Lane.DEVICE, STAGE, lambda: gpu.work("qkv"))
        sent = launcher.run(Lane.TO_HOST, STAGE, lambda: gpu.work("send"), (made,))
        task = HostTask(Lane.CPU, lambda _: STAGE, lambda _: None, flags)
        answered = launcher.host(task, 0, (sent,))
        arrived = launcher.run(Lane.TO_DEVICE, STAGE, lambda: gpu.work("fetch"), (answered,))
        launcher.run(Lane.DEVICE, STAGE, lambda: gpu.work("output"), (arrived,))

    return program


def flags() -> torch.Tensor:
    return torch.zeros(2, 1, 1, dtype=torch.int32)


def test_a_program_is_compiled_then_captured_and_launched_from_then_on(gpu: FakeGpu) -> None:
    runs = backend(gpu)
    record = offload_buffers(gpu, flags())
    assert carry_out(runs, "key", record)  # eager, which compiles the kernels; a capture must not
    assert gpu.names().count("work") == 4
    assert "begin capture" not in gpu.names()
    gpu.log.clear()
    assert carry_out(runs, "key", record)
    assert ("begin capture", "device", "thread_local") in gpu.log
    assert gpu.names().count("replay") == 1
    gpu.log.clear()
    assert not carry_out(runs, "key", record)  # from now on its duration is typical
    assert "work" not in gpu.names()
    assert gpu.names().count("replay") == 1
    runs.forget()
    assert carry_out(runs, "key", record)


@pytest.mark.parametrize("can_end", [True, False])
def test_a_capture_that_breaks_is_joined_and_ends_for_the_allocator_too(gpu: FakeGpu, can_end: bool) -> None:
    runs = backend(gpu)

    def program(launcher: Launcher) -> None:
        launcher.run(Lane.TO_HOST, STAGE, lambda: gpu.work("send"))
        if gpu.is_capturing:
            gpu.is_full = not can_end
            raise ValueError("broken")

    carry_out(runs, "key", program)
    with pytest.raises(ValueError, match="broken"):
        carry_out(runs, "key", program)
    begin, end = (gpu.log.index(entry) for entry in gpu.log if entry[0] in ("begin capture", "end capture"))
    captured = gpu.log[begin:end]
    forked = {lane for kind, lane, *_ in captured if kind == "wait" and lane != "device"}
    joined = {
        entry[2].stream
        for entry in captured[captured.index(("work", "send", "to-host")) :]
        if entry[:2] == ("wait", "device")
    }
    assert forked == joined
    assert gpu.log[end:] == [
        ("end capture", "device"),
        *([] if can_end else [("_cuda_endAllocateToPool",), ("_cuda_releasePool",)]),
    ]
    assert runs.abandon(ValueError("broken")) is None
    synchronized = {entry[1] for entry in gpu.log if entry[0] == "synchronize"}
    assert synchronized == {lane.value for lane in LANES}


def test_a_driver_without_memory_operations_is_found_out_at_the_start(gpu: FakeGpu) -> None:
    gpu.refuses = True
    flag = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(StreamMemoryError, match="cuStreamWriteValue32 failed with CUDA driver error 801"):
        check_flags(backend(gpu), flag)
    gpu.refuses = False
    with pytest.raises(StreamMemoryError, match="at once did not arrive"):
        check_flags(backend(gpu), flag)


@pytest.mark.gpu
@pytest.mark.usefixtures("any_queues")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_streams_raise_flags_and_wait_for_them() -> None:
    runs = StreamBackend(Streams(torch.device("cuda")), None)
    check_flags(runs, torch.ones(1, 16, dtype=torch.int32).pin_memory())
