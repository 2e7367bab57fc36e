"""The known GPUs, hosts and models, as tables."""

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from neo_desktop.app.simulate.machine import PUBLISHED
from neo_desktop.engine.simulation.presets import GPUS, HOSTS

GIB, GB = 2**30, 1e9


def print_catalogue(console: Console) -> None:
    gpus = [
        (
            *(gpu.name, f"{gpu.memory_bytes / GIB:.4g}", f"{gpu.memory_bytes_per_s / GB:,.0f}"),
            *(f"{gpu.tensor_flops / 1e12:.3g}", f"{gpu.bus_bytes_per_s / GB:.3g}"),
            *("yes" if gpu.has_bfloat16 else "no", gpu.host),
        )
        for gpu in GPUS.values()
    ]
    hosts = [
        (
            *(host.name, f"{host.memory_bytes / GIB:.4g}", f"{host.memory_bytes_per_s / GB:,.0f}"),
            *(str(host.cores), f"{host.attention_bytes_per_s / GB:,.0f}"),
        )
        for host in HOSTS.values()
    ]
    models = [
        (
            *(name, f"{config.weight_bytes(torch.float16) / GB:.1f}"),
            *(f"{config.kv_bytes_per_token(torch.float16) / 1e3:,.0f}", f"{config.max_context_tokens:,}"),
        )
        for name, config in PUBLISHED.items()
        if name != "tiny"  # of tests
    ]
    for title, columns, rows in (
        (
            "GPUs (--gpu): the vendors' datasheets; TFLOP/s are dense fp16 with fp32 sums",
            ("name", "GiB", "GB/s", "TFLOP/s", "PCIe GB/s", "bf16", "host"),
            gpus,
        ),
        (
            "Hosts (--cpu): datasheets, and at what rate CPU attention would read KV",
            ("name", "GiB", "GB/s", "cores", "KV GB/s"),
            hosts,
        ),
        (
            "Models (--model), with weights in 16 bits; a folder with a checkpoint will do, too",
            ("name", "weights, GB", "KV, KB per token", "context"),
            models,
        ),
    ):
        console.print(title, style="bold", highlight=False)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print(table)
