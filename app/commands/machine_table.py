"""What `neo-desktop info` prints."""

from rich.console import Console
from rich.table import Table

from neo_desktop.engine.profiling.hardware import Gpu, MachineInfo, PcieLink


def print_machine(machine: MachineInfo, console: Console) -> None:
    """Print hardware, versions and paths as a table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("CPU", f"{machine.cpu}, {machine.physical_cores} cores ({machine.usable_cores} usable)")
    caches = machine.caches
    sizes = (("L1d", caches.l1d_bytes), ("L2", caches.l2_bytes), ("L3", caches.l3_bytes))
    known = [f"{name} {_size(num_bytes)}" for name, num_bytes in sizes if num_bytes]
    if known:
        table.add_row("Caches", ", ".join(known))
    table.add_row("Attention kernel", machine.isa)
    memory = f"{_gb(machine.memory_bytes)}, {_gb(machine.available_bytes)} available"
    if machine.memory_limit_bytes is not None:
        memory += " (a container's limit)"
    table.add_row("Memory", memory)
    if len(machine.numa_nodes) > 1:
        for node in machine.numa_nodes:
            table.add_row(f"NUMA node {node.node}", f"{_gb(node.memory_bytes)}, CPUs {node.cpus}")
    swap = f"{_gb(machine.swap_bytes)}, {_gb(machine.swap_free_bytes)} free" if machine.swap_bytes else "none"
    table.add_row("Swap", swap)
    for gpu in machine.gpus:
        table.add_row("GPU", _gpu(gpu))
        for process in gpu.other_processes:
            used = "" if process.memory_bytes is None else f": {_gb(process.memory_bytes)}"
            table.add_row("", f"also used by {process.name} (process {process.pid}){used}")
    if machine.gpu_note:
        table.add_row("GPU", machine.gpu_note)
    for note in machine.notes:
        table.add_row("Note", note)
    table.add_row("neo-desktop", machine.neo_desktop)
    table.add_row("Python, torch", f"{machine.python}, {machine.torch}")
    table.add_row("System", machine.platform)
    table.add_row("Installed in", machine.package_folder)
    console.print(table, highlight=False)


def _gpu(gpu: Gpu) -> str:
    parts = [
        gpu.name,
        f"{gpu.sms} SMs" if gpu.sms else "",
        f"{_gb(gpu.memory_bytes)}, {_gb(gpu.free_bytes)} free",
        f"compute capability {gpu.capability}",
        f"driver {gpu.driver}",
        f"{_link(gpu.pcie)} (best {_link(gpu.pcie_max)})" if gpu.pcie and gpu.pcie_max else "",
    ]
    return ", ".join(part for part in parts if part)


def _link(link: PcieLink) -> str:
    return f"PCIe {link.generation} x{link.width}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def _size(num_bytes: int) -> str:
    """Caches come in powers of two."""
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
