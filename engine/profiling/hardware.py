"""Hardware and software of this computer, as relevant for the engine.

Missing parts raise no errors: a GPU, its driver, a system file. Notes list the unknown values.
"""

import errno
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pynvml
import torch

import neo_desktop
from neo_desktop import native
from neo_desktop.engine.cuda.presence import why_unusable
from neo_desktop.engine.fallbacks import fallbacks, is_wsl

_ROOT = Path("/")
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
# CUDA cores per multiprocessor by compute capability, from NVIDIA's programming guide; 128 for all others.
_CORES_PER_SM = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """Another program that uses a GPU."""

    pid: int
    name: str
    memory_bytes: int | None  # None: the driver does not say


@dataclass(frozen=True, slots=True)
class PcieLink:
    """A state of the link between GPU and host."""

    generation: int
    width: int  # lanes


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU, as the driver describes it."""

    name: str
    sms: int | None  # streaming multiprocessors
    memory_bytes: int
    free_bytes: int
    driver: str
    capability: str  # compute capability, "8.6"
    pcie: PcieLink | None  # current state; an idle GPU reduces it to save power
    pcie_max: PcieLink | None  # the best that GPU and slot support
    other_processes: tuple[GpuProcess, ...]  # as far as the driver shows them to this process


@dataclass(frozen=True, slots=True)
class CpuCaches:
    """Cache sizes of the first core; None: the system does not say."""

    l1d_bytes: int | None
    l2_bytes: int | None
    l3_bytes: int | None


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A memory node and its CPUs."""

    node: int
    cpus: str  # in Linux notation, "0-7,16-23"
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory of this process, including a container's limit."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None  # of the cgroup; None: no limit


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """Hardware, versions and paths."""

    cpu: str
    physical_cores: int
    logical_cores: int
    usable_cores: int  # allowed by affinity mask and cgroup
    isa: str  # instruction set of the attention kernel
    caches: CpuCaches
    numa_nodes: tuple[NumaNode, ...]
    memory_bytes: int
    available_bytes: int
    memory_limit_bytes: int | None
    swap_bytes: int
    swap_free_bytes: int
    gpus: tuple[Gpu, ...]
    gpu_note: str  # reason for missing GPUs or an unusable torch; empty if all is well
    notes: tuple[str, ...]  # unknown values
    neo_desktop: str
    python: str
    torch: str
    platform: str
    package_folder: str


def machine_info() -> MachineInfo:
    """Describe this computer; succeeds without a GPU or its driver."""
    memory, swap = host_memory(), psutil.swap_memory()
    gpus, gpu_note, notes = find_gpus()
    gpu_note = why_unusable() or gpu_note
    return MachineInfo(
        cpu=cpu_name(),
        physical_cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        logical_cores=os.cpu_count() or 1,
        usable_cores=native.num_usable_cpus(),
        isa=native.default_isa(),
        caches=cpu_caches(),
        numa_nodes=numa_nodes(),
        memory_bytes=memory.total_bytes,
        available_bytes=memory.available_bytes,
        memory_limit_bytes=memory.limit_bytes,
        swap_bytes=swap.total,
        swap_free_bytes=swap.free,
        gpus=gpus,
        gpu_note=gpu_note,
        notes=notes,
        neo_desktop=version("neo-desktop"),
        python=platform.python_version(),
        torch=torch.__version__,
        platform=platform.platform() + (" in Windows (WSL2)" if is_wsl() else ""),
        package_folder=str(Path(neo_desktop.__file__).resolve().parent),
    )


def find_gpus() -> tuple[tuple[Gpu, ...], str, tuple[str, ...]]:
    """Return the GPUs, the reason if none is usable, and the values that the driver withheld."""
    if fallbacks.level("nvml") == "without":
        return _gpus_of_torch()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if not torch.cuda.is_available():
            return (), f"no NVIDIA driver: {error}", ()
        fallbacks.limit("nvml", "without", f"the driver's library for it cannot be used: {error}")
        return _gpus_of_torch()
    gpus: list[Gpu] = []
    notes: list[str] = []
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                gpus.append(_gpu(pynvml.nvmlDeviceGetHandleByIndex(index), driver, notes))
            except pynvml.NVMLError as error:
                notes.append(f"GPU {index} cannot be queried: {error}")
    except pynvml.NVMLError as error:
        notes.append(f"the NVIDIA driver cannot be queried: {error}")
    finally:
        pynvml.nvmlShutdown()
    note = "" if gpus else "the NVIDIA driver lists no GPU"
    if gpus and not torch.cuda.is_available():
        built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
        note = f"torch {torch.__version__} (built for {built_for}) cannot use the GPU with this driver"
    return tuple(gpus), note, tuple(notes)


def _gpus_of_torch() -> tuple[tuple[Gpu, ...], str, tuple[str, ...]]:
    """Return the result of `find_gpus` from torch's knowledge alone."""
    if not torch.cuda.is_available():
        return (), "torch finds no usable GPU, and the driver is not queried", ()
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(
            Gpu(
                name=properties.name,
                sms=properties.multi_processor_count,
                memory_bytes=total,
                free_bytes=free,
                driver="unknown",
                capability=f"{properties.major}.{properties.minor}",
                pcie=None,
                pcie_max=None,
                other_processes=(),
            )
        )
    note = "driver version, PCIe link and other programs unknown: the driver is not queried"
    return tuple(gpus), "", (note,)


def _gpu(handle: object, driver: str, notes: list[str]) -> Gpu:
    name = pynvml.nvmlDeviceGetName(handle)

    def ask(what: str, *functions: Callable[[object], Any]) -> list[Any] | None:
        try:
            return [function(handle) for function in functions]
        except pynvml.NVMLError as error:
            notes.append(f"{name}: {what} unknown: {error}")
            return None

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    capability = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    cores = ask("number of SMs", pynvml.nvmlDeviceGetNumGpuCores)
    now = ask("PCIe link", pynvml.nvmlDeviceGetCurrPcieLinkGeneration, pynvml.nvmlDeviceGetCurrPcieLinkWidth)
    best = ask(
        "best PCIe link", pynvml.nvmlDeviceGetMaxPcieLinkGeneration, pynvml.nvmlDeviceGetMaxPcieLinkWidth
    )
    lists = ask(
        "other programs",
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetGraphicsRunningProcesses,
    )
    others = [each for listed in lists or () for each in listed if each.pid != os.getpid()]
    memory_of = {each.pid: each.usedGpuMemory for each in others}
    return Gpu(
        name=name,
        sms=cores[0] // _CORES_PER_SM.get(capability, 128) if cores else None,
        memory_bytes=memory.total,
        free_bytes=memory.free,
        driver=driver,
        capability=".".join(map(str, capability)),
        pcie=PcieLink(*now) if now else None,
        pcie_max=PcieLink(*best) if best else None,
        other_processes=tuple(
            GpuProcess(pid, _process_name(pid), used) for pid, used in sorted(memory_of.items())
        ),
    )


@contextmanager
def _driver() -> Iterator[None]:
    """Open the driver's library for queries."""
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def driver_free_bytes(device: torch.device) -> int:
    """Return a GPU's free memory according to the driver, or its total memory if the driver does not say.

    CUDA reports it more exactly, but a CUDA context would take some of that memory for the rest of the
    process.
    """
    properties = torch.cuda.get_device_properties(device)
    try:
        with _driver():
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{str(properties.uuid).removeprefix('GPU-')}")
            return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
    except pynvml.NVMLError:
        return int(properties.total_memory)


def driver_version() -> str:
    """Return the version of the NVIDIA driver, or the reason why it is unknown."""
    if fallbacks.level("nvml") == "without":
        return "unknown: the driver is not queried"
    try:
        with _driver():
            return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        return f"unknown: {error}"


def cpu_name() -> str:
    """Return the model name of the CPU."""
    text = _read(_ROOT / "proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cpu_caches(root: Path = _ROOT) -> CpuCaches:
    """Return the caches of the first CPU."""
    sizes: dict[tuple[str, str], int] = {}
    for folder in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*"):
        size, kind = _read(folder / "size"), (_read(folder / "level"), _read(folder / "type"))
        if size[:-1].isdigit():
            sizes[kind] = int(size[:-1]) << {"K": 10, "M": 20, "G": 30}.get(size[-1], 0)
    return CpuCaches(*map(sizes.get, (("1", "Data"), ("2", "Unified"), ("3", "Unified"))))


def last_level_cache_bytes() -> int:
    """Return the size of the first CPU's largest cache; 0: the system does not say."""
    caches = cpu_caches()
    return caches.l3_bytes or caches.l2_bytes or 0


def numa_nodes(root: Path = _ROOT) -> tuple[NumaNode, ...]:
    """Return the NUMA nodes; empty: the system does not say."""
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        # Lines like "Node 0 MemTotal:  24737340 kB".
        words = [line.split() for line in _read(folder / "meminfo").splitlines()]
        kib = {line[2].rstrip(":"): int(line[3]) for line in words if len(line) > 3}
        nodes.append(
            NumaNode(
                node=int(folder.name.removeprefix("node")),
                cpus=_read(folder / "cpulist"),
                memory_bytes=kib.get("MemTotal", 0) * 1024,
                free_bytes=kib.get("MemFree", 0) * 1024,
            )
        )
    return tuple(sorted(nodes, key=lambda node: node.node))


_last_memory: dict[Path, HostMemory] = {}  # root -> last result


def host_memory(root: Path = _ROOT) -> HostMemory:
    """Return the memory of this process: the machine's, or its container's if that is less.

    If the system has no file handle or memory left for the query, return the last result.

    Raises:
        OSError: the system cannot be queried, and no earlier result exists.
    """
    try:
        _last_memory[root] = _look_at_memory(root)
    except OSError:
        if root not in _last_memory:
            raise
    return _last_memory[root]


def _look_at_memory(root: Path) -> HostMemory:
    memory = psutil.virtual_memory()
    total, available, limit = memory.total, memory.available, None
    for folder, limit_file, used_file in _memory_cgroups(root):
        text = _read(folder / limit_file, surely=True)
        if not text.isdigit() or int(text) >= memory.total:  # "max", or the huge number of cgroup v1
            continue
        used = _read(folder / used_file, surely=True)
        stat = dict(line.split() for line in _read(folder / "memory.stat", surely=True).splitlines())
        # The system reclaims the cgroup's page cache on demand.
        reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        room = int(text) - (int(used) if used.isdigit() else 0) + reclaimable
        limit = min(int(text), limit or int(text))
        total, available = min(total, int(text)), min(available, max(room, 0))
    return HostMemory(total, available, limit)


def _memory_cgroups(root: Path) -> list[tuple[Path, str, str]]:
    """Return the folders of this process's memory cgroup and its ancestors, with the names of their files.

    In a container the kernel may report the host's path, which is not visible there. The mounted root is then
    the container's own group.
    """
    folders = []
    for line in _read(root / "proc/self/cgroup", surely=True).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers == "":
            top, files = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, files = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        folders += [(top.joinpath(*parts[:depth]), *files) for depth in range(len(parts) + 1)]
    return folders


def _process_name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except (psutil.Error, OSError):  # it has ended, or it runs outside this container
        return "unknown"


def _read(path: Path, *, surely: bool = False) -> str:
    """Return the content of a system file; "" if the file does not exist or cannot be read.

    With `surely`, raise OSError if the system has no resources left to read it: the file may exist.
    """
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        if surely and error.errno in _EXHAUSTED:
            raise
        return ""
