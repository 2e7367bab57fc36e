"""A person's own figures of a GPU and a host."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from neo_desktop.app.commands.simulate_command import SimulationOptions, UsageError
from neo_desktop.engine.simulation.machine import GB, GIB, TFLOPS, GpuPreset, HostPreset

OWN_GPU = "a GPU of your own"
_BUS_BYTES_PER_S = 15.75 * GB  # of own figures without: PCIe 3.0 x16, or 4.0 x8
_HOST = "ddr4-desktop"  # of own figures

# Key of a --gpu-json file -> whether it must be there, what it is.
_JSON_KEYS = {
    "name": (False, "a text"),
    "memory_gib": (True, "a number above 0"),
    "bandwidth_gb_per_s": (True, "a number above 0"),
    "tflops": (True, "a number above 0"),
    "pcie_gb_per_s": (False, "a number above 0"),
    "bfloat16": (False, "true or false"),
}


# Options of figures that a person may state -> the most that any machine has.
_MOST = {
    "--gpu-memory": ("gpu_memory_gib", 10_000),
    "--gpu-bandwidth": ("gpu_bandwidth_gb_per_s", 100_000),
    "--gpu-tflops": ("gpu_tflops", 100_000),
    "--cpu-memory": ("cpu_memory_gib", 100_000),
    "--cpu-bandwidth": ("cpu_bandwidth_gb_per_s", 10_000),
    "--cpu-cores": ("cpu_cores", 1024),
    "--worker-bandwidth": ("worker_bandwidth_gb_per_s", 10_000),
    "--worker-memory": ("worker_memory_gib", 100_000),
    "--link": ("link_gbit_per_s", 100_000),
    "--latency": ("latency_us", 1_000_000),
    "--gpu-price": ("gpu_price", 1_000_000),
    "--worker-price": ("worker_price", 1_000_000),
}


def check_own(options: SimulationOptions) -> None:
    """Raise UsageError for figures that no machine has."""
    for flag, (name, most) in _MOST.items():
        value = getattr(options, name)
        if value is not None and not 0 < value <= most:  # nor NaN
            raise UsageError(f"{flag} is {value:g}: expected a number above 0, at most {most:,}")


def blank_gpu(name: str = OWN_GPU) -> GpuPreset:
    """A GPU whose memory and speed are still to be stated."""
    return GpuPreset(name, _HOST, 0, 0.0, 0.0, _BUS_BYTES_PER_S, None)


def own_gpu(gpu: GpuPreset, own: SimulationOptions) -> GpuPreset:
    """Return the GPU with what was stated instead of its own."""
    if own.gpu_memory_gib is not None:
        gpu = replace(gpu, memory_bytes=int(own.gpu_memory_gib * GIB))
    if own.gpu_bandwidth_gb_per_s is not None:
        gpu = replace(gpu, memory_bytes_per_s=own.gpu_bandwidth_gb_per_s * GB)
    if own.gpu_tflops is not None:
        gpu = replace(gpu, tensor_flops=own.gpu_tflops * TFLOPS)
    return gpu


def own_host(host: HostPreset, own: SimulationOptions) -> HostPreset:
    """Return the host with what was stated instead of its own."""
    if own.cpu_memory_gib is not None:
        host = replace(host, memory_bytes=int(own.cpu_memory_gib * GIB))
    if own.cpu_bandwidth_gb_per_s is not None:
        host = replace(host, memory_bytes_per_s=own.cpu_bandwidth_gb_per_s * GB)
    if own.cpu_cores is not None:
        host = replace(host, cores=own.cpu_cores)
    return host


def read_gpu(path: Path) -> GpuPreset:
    """Read a GPU's figures: `{"memory_gib": 12, "bandwidth_gb_per_s": 360, "tflops": 25.5}`, and optionally
    `name`, `pcie_gb_per_s` and `bfloat16`.

    Raises:
        UsageError: the file holds something else.
        OSError: it cannot be read.
    """
    values = read_object(path)
    unknown = [key for key in values if key not in _JSON_KEYS]
    if unknown:
        raise UsageError(f"{path}: {unknown[0]!r} is no figure of a GPU; there are {', '.join(_JSON_KEYS)}")
    for key, (is_needed, wanted) in _JSON_KEYS.items():
        if key not in values and is_needed:
            raise UsageError(f"{path}: {key!r} is missing, expected {wanted}")
        if key in values and not _is(values[key], wanted):
            raise UsageError(f"{path}: {key!r} is {values[key]!r}, expected {wanted}")
    gpu = blank_gpu(str(values.get("name", OWN_GPU)))
    gpu = replace(gpu, has_bfloat16=bool(values.get("bfloat16", True)))
    if "pcie_gb_per_s" in values:
        gpu = replace(gpu, bus_bytes_per_s=values["pcie_gb_per_s"] * GB)
    return own_gpu(
        gpu,
        SimulationOptions(
            gpu_memory_gib=values["memory_gib"],
            gpu_bandwidth_gb_per_s=values["bandwidth_gb_per_s"],
            gpu_tflops=values["tflops"],
        ),
    )


def _is(value: Any, wanted: str) -> bool:
    if wanted == "a text":
        return isinstance(value, str) and value != ""
    if wanted == "true or false":
        return isinstance(value, bool)
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises UsageError where the file holds none, OSError where it cannot be read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, RecursionError):
        raise UsageError(f"{path}: this is no JSON file") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}, line {error.lineno}: not valid JSON ({error.msg})") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path}: this is not a JSON object")
    return values
