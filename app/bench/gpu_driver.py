"""What NVIDIA's driver says about the GPU in use: its clocks, its power, and who else works on it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pynvml

from neo_desktop.engine.profiling.hardware import GpuProcess, find_gpus


@dataclass(frozen=True, slots=True)
class GpuState:
    """A GPU at one moment; None: the driver does not say."""

    name: str
    utilisation: float | None  # 0 to 1: share of the last moments in which it was busy
    temperature_c: float | None
    power_w: float | None
    power_limit_w: float | None
    sm_clock_mhz: float | None
    max_sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    other_processes: tuple[GpuProcess, ...]


class GpuDriver:
    """One GPU's driver; see `gpu_driver`."""

    def __init__(self, handle: object) -> None:
        self._handle = handle

    def state(self) -> GpuState:
        """Ask for everything."""

        nvml, handle = pynvml, self._handle
        return GpuState(
            name=_text(nvml.nvmlDeviceGetName(handle)),
            utilisation=_asked(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu, 0.01),
            temperature_c=_asked(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            power_w=_asked(lambda: nvml.nvmlDeviceGetPowerUsage(handle), 1e-3),
            power_limit_w=_asked(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle), 1e-3),
            sm_clock_mhz=_asked(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            max_sm_clock_mhz=_asked(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
            memory_clock_mhz=_asked(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            other_processes=self._other_processes(),
        )

    def energy_j(self) -> float | None:
        """Joules since the driver was loaded; None where it does not count them."""
        return _asked(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle), 1e-3)

    def _other_processes(self) -> tuple[GpuProcess, ...]:
        index = _asked(lambda: pynvml.nvmlDeviceGetIndex(self._handle))
        gpus, _, _ = find_gpus()
        return gpus[int(index)].other_processes if index is not None and index < len(gpus) else ()


@contextmanager
def gpu_driver(uuid: str) -> Iterator[GpuDriver | None]:
    """Open the driver of the GPU that torch knows by this UUID; None where there is no such driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        try:
            driver = GpuDriver(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}"))
        except pynvml.NVMLError:
            driver = None
        yield driver
    finally:
        pynvml.nvmlShutdown()


def _asked(function: Callable[[], Any], factor: float = 1.0) -> float | None:
    try:
        return float(function()) * factor
    except pynvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    """Older versions of pynvml give bytes."""
    return value.decode() if isinstance(value, bytes) else value
