"""The table of `neo-desktop info`."""

from rich.console import Console
from rich.table import Table

from neo_desktop.app.words import binary_size, size
from neo_desktop.engine.profiling.hardware import Gpu, MachineInfo, PcieLink


def print_machine(machine: MachineInfo, console: Console) -> None:
    """Print hardware, versions and paths as a table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("CPU", f"{machine.cpu}, {machine.physical_cores} cores ({machine.usable_cores} usable)")
    caches = machine.caches
    sizes = (("L1d", caches.l1d_bytes), ("L2", caches.l2_bytes), ("L3", caches.l3_bytes))
    known = [f"{name} {binary_size(num_bytes)}" for name, num_bytes in sizes if num_bytes]
    if known:
        table.add_row("Caches", ", ".join(known))
    table.add_row("Attention kernel", machine.isa)
    memory = f"{size(machine.memory_bytes)}, {size(machine.available_bytes)} available"
    if machine.memory_limit_bytes is not None:
        memory += " (a container's limit)"
    table.add_row("Memory", memory)
    if len(machine.numa_nodes) > 1:
        for node in machine.numa_nodes:
            table.add_row(f"NUMA node {node.node}", f"{size(node.memory_bytes)}, CPUs {node.cpus}")
    swap = (
        f"{size(machine.swap_bytes)}, {size(machine.swap_free_bytes)} free" if machine.swap_bytes else "none"
    )
    table.add_row("Swap", swap)
    for gpu in machine.gpus:
        table.add_row("GPU", _gpu(gpu))
        for process in gpu.other_processes:
            used = "" if process.memory_bytes is None else f": {size(process.memory_bytes)}"
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
        f"{size(gpu.memory_bytes)}, {size(gpu.free_bytes)} free",
        f"compute capability {gpu.capability}",
        f"driver {gpu.driver}",
        f"{_link(gpu.pcie)} (best {_link(gpu.pcie_max)})" if gpu.pcie and gpu.pcie_max else "",
    ]
    return ", ".join(part for part in parts if part)


def _link(link: PcieLink) -> str:
    return f"PCIe {link.generation} x{link.width}"
