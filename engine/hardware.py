"""What this computer has, as far as the engine cares."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
import pynvml
import torch

import neo_desktop.engine
from neo_desktop import native


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU, as the driver describes it."""

    name: str
    memory_bytes: int
    free_bytes: int
    driver: str
    capability: str  # compute capability, "8.6"


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """Hardware, versions and paths."""

    cpu: str
    physical_cores: int
    usable_cores: int  # what affinity mask and cgroup leave to this process
    isa: str  # the instruction set of the attention kernel
    memory_bytes: int
    available_bytes: int
    gpus: tuple[Gpu, ...]
    gpu_note: str  # why there are no GPUs, or why torch cannot use them; empty if all is well
    neo_desktop: str
    python: str
    torch: str
    platform: str
    package_folder: str


def machine_info() -> MachineInfo:
    """Look at this computer; never fails for want of a GPU or its driver."""
    memory = psutil.virtual_memory()
    gpus, note = _gpus()
    return MachineInfo(
        cpu=cpu_name(),
        physical_cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        usable_cores=native.default_num_threads(),
        isa=native.default_isa(),
        memory_bytes=memory.total,
        available_bytes=memory.available,
        gpus=gpus,
        gpu_note=note,
        neo_desktop=version("neo-desktop"),
        python=platform.python_version(),
        torch=torch.__version__,
        platform=platform.platform(),
        package_folder=str(Path(neo_desktop.engine.__path__[0]).resolve()),
    )


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), f"no NVIDIA driver: {error}"
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        gpus = tuple(_gpu(handle, driver) for handle in handles)
    finally:
        pynvml.nvmlShutdown()
    if gpus and not torch.cuda.is_available():
        built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
        return gpus, f"torch {torch.__version__} (built for {built_for}) cannot use the GPU with this driver"
    return gpus, "" if gpus else "the NVIDIA driver lists no GPU"


def _gpu(handle: object, driver: str) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=memory.total,
        free_bytes=memory.free,
        driver=driver,
        capability=f"{major}.{minor}",
    )


def cpu_name() -> str:
    """Return the model name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def last_level_cache_bytes() -> int:
    """Return the size of the largest cache of the first CPU; 0 where the system does not say."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]])
    return max(sizes)


def driver_version() -> str:
    """Return the version of the NVIDIA driver, or why it cannot be asked."""
    try:
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return f"unknown: {error}"
