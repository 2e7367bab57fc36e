"""A GPU with known rates, and its NVIDIA driver, for measuring suites."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from neo_desktop.app.bench.device_rates import Direction
from neo_desktop.engine.cuda.streams import Streams

LAUNCH_S = 4e-6  # launch overhead of any work
FLOP_PER_S = 80e12
READ_BYTES_PER_S = 800e9
BUS_BYTES_PER_S = {Direction.TO_DEVICE: 24e9, Direction.TO_HOST: 20e9}
UUID = "12345678-aaaa-bbbb-cccc-1234567890ab"


class FakeTimer:
    """A `CudaTimer` with its own clock, which counts its requests."""

    name = "Fake RTX"
    dtypes = ("float16", "bfloat16")

    def __init__(
        self, streams: Streams, memory_bytes: int, matrix_size: int, transfer_bytes: int = 0
    ) -> None:
        self.streams = streams
        self.memory_bytes = memory_bytes
        self._matrix_size, self._transfer_bytes = matrix_size, transfer_bytes
        self.calls: list[tuple[Any, ...]] = []

    def matrix_seconds(self, size: int, dtype: str, times: int) -> float:
        assert size <= self._matrix_size
        self.calls.append(("matrix", size, dtype, times))
        return times * (LAUNCH_S + 2 * size**3 / FLOP_PER_S)

    def read_seconds(self, nbytes: int, times: int) -> float:
        assert nbytes <= self.memory_bytes
        self.calls.append(("read", nbytes, times))
        return times * (LAUNCH_S + nbytes / READ_BYTES_PER_S)

    def copy_seconds(self, nbytes: int, times: int) -> float:
        self.calls.append(("copy", nbytes, times))
        return times * (LAUNCH_S + 1.25 * nbytes / READ_BYTES_PER_S)

    def transfer_seconds(self, nbytes: int, ways: tuple[Direction, ...], times: int) -> float:
        assert nbytes <= self._transfer_bytes
        self.calls.append(("transfer", nbytes, ways, times))
        return times * max(LAUNCH_S + nbytes / BUS_BYTES_PER_S[way] for way in ways)


class FakeNvml:
    """pynvml on a shared, busy GPU; functions named in `refuse` are not supported."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2

    def __init__(self) -> None:
        self.refuse: tuple[str, ...] = ()
        self.num_open = 0
        self.energy_mj = 5_000_000
        self.answers: dict[str, Any] = {
            "nvmlSystemGetDriverVersion": "570.86.15",
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "a handle",
            "nvmlDeviceGetIndex": 0,
            "nvmlDeviceGetName": "Fake RTX",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=8 << 30, free=6 << 30),
            "nvmlDeviceGetCudaComputeCapability": [8, 6],
            "nvmlDeviceGetNumGpuCores": 2560,
            "nvmlDeviceGetCurrPcieLinkGeneration": 4,
            "nvmlDeviceGetCurrPcieLinkWidth": 16,
            "nvmlDeviceGetMaxPcieLinkGeneration": 4,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=os.getpid(), usedGpuMemory=1 << 30)],
            "nvmlDeviceGetGraphicsRunningProcesses": [
                SimpleNamespace(pid=os.getppid(), usedGpuMemory=2_100_000_000)
            ],
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=43, memory=12),
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetPowerUsage": 95_500,
            "nvmlDeviceGetEnforcedPowerLimit": 200_000,
            "nvmlDeviceGetMaxClockInfo": 2100,
        }

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def function(*arguments: object) -> Any:
            if name in self.refuse:
                raise FakeNvml.NVMLError("Not Supported")
            if name in ("nvmlInit", "nvmlShutdown"):
                self.num_open += 1 if name == "nvmlInit" else -1
                return None
            assert self.num_open > 0
            if name == "nvmlDeviceGetHandleByUUID":
                if arguments != (f"GPU-{UUID}",):
                    raise FakeNvml.NVMLError("Not Found")
                return "a handle"
            if name == "nvmlDeviceGetClockInfo":
                return {1: 1800, 2: 7000}[arguments[1]]  # type: ignore[index]
            if name == "nvmlDeviceGetTotalEnergyConsumption":
                return self.energy_mj
            return self.answers[name]

        return function
