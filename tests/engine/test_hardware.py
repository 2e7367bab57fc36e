"""The hardware probe reports available hardware and never fails if hardware is missing."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from neo_desktop.engine.profiling import hardware
from neo_desktop.engine.profiling.hardware import CpuCaches, GpuProcess, NumaNode, PcieLink

GIB = 1024**3


class FakeNvml:
    """pynvml on a T4 that other programs share; functions named in `refuse` are not supported."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.refuse: tuple[str, ...] = ()
        self.is_open = False
        this_one = SimpleNamespace(pid=os.getpid(), usedGpuMemory=GIB)
        self.answers = {
            "nvmlSystemGetDriverVersion": "570.86.15",
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "a handle",
            "nvmlDeviceGetName": "Tesla T4",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=15 * GIB, free=12 * GIB),
            "nvmlDeviceGetCudaComputeCapability": [7, 5],
            "nvmlDeviceGetNumGpuCores": 2560,
            "nvmlDeviceGetCurrPcieLinkGeneration": 1,
            "nvmlDeviceGetCurrPcieLinkWidth": 8,
            "nvmlDeviceGetMaxPcieLinkGeneration": 3,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetComputeRunningProcesses": [
                this_one,
                SimpleNamespace(pid=10**9, usedGpuMemory=None),
            ],
            "nvmlDeviceGetGraphicsRunningProcesses": [
                SimpleNamespace(pid=os.getppid(), usedGpuMemory=2 * GIB)
            ],
        }

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def function(*_: object) -> Any:
            if name in self.refuse:
                raise FakeNvml.NVMLError("Not Supported")
            if name in ("nvmlInit", "nvmlShutdown"):
                self.is_open = name == "nvmlInit"
                return None
            assert self.is_open
            return self.answers[name]

        return function


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setattr(hardware, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return fake


def test_a_gpu_is_described_in_full(nvml: FakeNvml) -> None:
    (gpu,), note, notes = hardware.find_gpus()
    assert (note, notes) == ("", ())
    assert (gpu.name, gpu.sms, gpu.capability, gpu.driver) == ("Tesla T4", 40, "7.5", "570.86.15")
    assert (gpu.memory_bytes, gpu.free_bytes) == (15 * GIB, 12 * GIB)
    assert (gpu.pcie, gpu.pcie_max) == (PcieLink(1, 8), PcieLink(3, 16))
    assert not nvml.is_open


def test_other_programs_on_the_gpu_are_listed_and_this_one_is_not(nvml: FakeNvml) -> None:
    (gpu,), _, _ = hardware.find_gpus()
    by_pid = {process.pid: process for process in gpu.other_processes}
    assert set(by_pid) == {os.getppid(), 10**9}
    assert by_pid[os.getppid()].memory_bytes == 2 * GIB
    assert by_pid[10**9] == GpuProcess(10**9, "unknown", None)


@pytest.mark.parametrize("refused", ["nvmlSystemGetDriverVersion", "nvmlDeviceGetCount", "nvmlDeviceGetName"])
def test_a_driver_that_fails_midway_costs_the_gpu_and_not_the_program(nvml: FakeNvml, refused: str) -> None:
    nvml.refuse = (refused,)
    gpus, note, notes = hardware.find_gpus()
    assert gpus == ()
    assert note
    assert "Not Supported" in notes[0]
    assert not nvml.is_open


def test_without_a_driver_there_is_a_note_and_no_gpu(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.refuse = ("nvmlInit",)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware.find_gpus() == ((), "no NVIDIA driver: Not Supported", ())
    assert "unknown" in hardware.driver_version()


def test_a_gpu_that_torch_cannot_use_is_told(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpus, note, _ = hardware.find_gpus()
    assert len(gpus) == 1
    assert "cannot use the GPU" in note


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_caches_and_numa_nodes_are_read_from_the_system(tmp_path: Path) -> None:
    caches = {0: ("1", "Data", "48K"), 1: ("1", "Instruction", "32K"), 2: ("2", "Unified", "2048K")}
    caches[3] = ("3", "Unified", "300M")
    for index, values in caches.items():
        folder = f"sys/devices/system/cpu/cpu0/cache/index{index}"
        names = ("level", "type", "size")
        write(tmp_path, {f"{folder}/{name}": value for name, value in zip(names, values, strict=True)})
    for node, cpus in enumerate(("0-7", "8-15")):
        meminfo = f"Node {node} MemTotal:  1024 kB\nNode {node} MemFree:  512 kB"
        folder = f"sys/devices/system/node/node{node}"
        write(tmp_path, {f"{folder}/cpulist": cpus, f"{folder}/meminfo": meminfo})
    assert hardware.cpu_caches(tmp_path) == CpuCaches(48 << 10, 2 << 20, 300 << 20)
    assert hardware.numa_nodes(tmp_path) == (
        NumaNode(0, "0-7", 1 << 20, 512 << 10),
        NumaNode(1, "8-15", 1 << 20, 512 << 10),
    )


def test_a_system_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    assert hardware.cpu_caches(tmp_path) == CpuCaches(None, None, None)
    assert hardware.numa_nodes(tmp_path) == ()
    memory = hardware.host_memory(tmp_path)
    assert memory.limit_bytes is None
    assert 0 < memory.available_bytes <= memory.total_bytes


@pytest.mark.parametrize(
    ("cgroup", "folder", "limit", "used"),
    [
        ("0::/box", "sys/fs/cgroup/box", "memory.max", "memory.current"),
        ("0::/", "sys/fs/cgroup", "memory.max", "memory.current"),
        ("0::/not/seen/here", "sys/fs/cgroup", "memory.max", "memory.current"),
        (
            "4:cpu,memory:/box",
            "sys/fs/cgroup/memory/box",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
        ),
    ],
)
def test_a_containers_limit_counts(tmp_path: Path, cgroup: str, folder: str, limit: str, used: str) -> None:
    stat = "anon 1\ninactive_file 1000"
    files = {limit: str(64 << 20), used: str(48 << 20), "memory.stat": stat}
    write(tmp_path, {"proc/self/cgroup": cgroup})
    write(tmp_path, {f"{folder}/{name}": text for name, text in files.items()})
    memory = hardware.host_memory(tmp_path)
    assert memory.limit_bytes == memory.total_bytes == 64 << 20
    assert memory.available_bytes == (16 << 20) + 1000


@pytest.mark.parametrize("text", ["max", str(2**63 - 4096)])
def test_no_limit_is_no_limit(tmp_path: Path, text: str) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/box", "sys/fs/cgroup/box/memory.max": text})
    assert hardware.host_memory(tmp_path).limit_bytes is None


def test_memory_is_what_it_was_while_no_file_can_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    known = hardware.host_memory()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)  # a known container limit must survive
        assert hardware.host_memory() == known
    monkeypatch.setattr(hardware.psutil, "virtual_memory", refuse)
    assert hardware.host_memory() == known
    monkeypatch.setattr(hardware, "_last_memory", {})
    with pytest.raises(OSError, match="Too many open files"):
        hardware.host_memory()
