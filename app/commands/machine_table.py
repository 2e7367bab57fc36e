"""The rows of `neo-desktop info`."""

from collections.abc import Iterator

from neo_desktop.app.words import binary_size, size
from neo_desktop.engine.profiling.hardware import Gpu, MachineInfo


def machine_rows(machine: MachineInfo) -> Iterator[tuple[str, str]]:
    yield "CPU", f"{machine.cpu}, {machine.physical_cores} cores ({machine.usable_cores} usable)"
    caches = machine.caches
    sizes = (("L1d", caches.l1d_bytes), ("L2", caches.l2_bytes), ("L3", caches.l3_bytes))
    if known := [f"{name} {binary_size(num_bytes)}" for name, num_bytes in sizes if num_bytes]:
        yield "Caches", ", ".join(known)
    yield "Attention kernel", machine.isa
    limit = "" if machine.memory_limit_bytes is None else " (a container's limit)"
    yield "Memory", f"{size(machine.memory_bytes)}, {size(machine.available_bytes)} available{limit}"
    if len(machine.numa_nodes) > 1:
        for node in machine.numa_nodes:
            yield f"NUMA node {node.node}", f"{size(node.memory_bytes)}, CPUs {node.cpus}"
    free = f"{size(machine.swap_bytes)}, {size(machine.swap_free_bytes)} free"
    yield "Swap", free if machine.swap_bytes else "none"
    for gpu in machine.gpus:
        yield "GPU", _gpu(gpu)
        for process in gpu.other_processes:
            used = "" if process.memory_bytes is None else f": {size(process.memory_bytes)}"
            yield "", f"also used by {process.name} (process {process.pid}){used}"
    if machine.gpu_note:
        yield "GPU", machine.gpu_note
    yield from (("Note", note) for note in machine.notes)
    yield "neo-desktop", machine.neo_desktop
    yield "Python, torch", f"{machine.python}, {machine.torch}"
    yield "System", machine.platform
    yield "Installed in", machine.package_folder


def _gpu(gpu: Gpu) -> str:
    parts = [
        gpu.name,
        f"{gpu.sms} SMs" if gpu.sms else "",
        f"{size(gpu.memory_bytes)}, {size(gpu.free_bytes)} free",
        f"compute capability {gpu.capability}",
        f"driver {gpu.driver}",
    ]
    if gpu.pcie and gpu.pcie_max:
        now, best = (f"PCIe {link.generation} x{link.width}" for link in (gpu.pcie, gpu.pcie_max))
        parts.append(f"{now} (best {best})")
    return ", ".join(part for part in parts if part)
