"""A simulated machine with attention workers, from options."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from neo_desktop.app.commands.simulate_command import SimulationOptions, UsageError
from neo_desktop.app.simulate.fleet import Fleet
from neo_desktop.app.simulate.machine import Machine
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.simulation.analytic import KVBudget
from neo_desktop.engine.simulation.machine import GB, GIB
from neo_desktop.engine.simulation.presets import get_host
from neo_desktop.engine.simulation.workers import (
    Link,
    SteadyLoad,
    Workers,
    with_workers,
    workers_wanted,
)
from neo_desktop.engine.simulation.workload import WorkloadRequest

# What is taken where nobody says: an old server's memory, and a network of 10 Gbit/s behind one switch.
MEMORY_GIB, LINK_GBIT_PER_S, LATENCY_US = 64.0, 10.0, 100.0
_USUAL = "ddr4-server"  # has as many cores per GB/s as a worker is taken to have
_MOST_WORKERS = 1024


def add_workers(
    machine: Machine, options: SimulationOptions, requests: Sequence[WorkloadRequest], limits: SchedulerLimits
) -> Machine:
    """Return the machine with workers, which attend in place of its own host; without any, the same one.

    Raises:
        UsageError: the options make no sense.
    """
    stated = {
        "--workers": options.workers,
        "--worker-memory": options.worker_memory_gib,
        "--link": options.link_gbit_per_s,
        "--latency": options.latency_us,
        "--gpu-price": options.gpu_price,
        "--worker-price": options.worker_price,
    }
    gb_per_s = options.worker_bandwidth_gb_per_s
    if gb_per_s is None:
        for flag, value in stated.items():
            if value is not None:
                raise UsageError(f"{flag} is about attention workers: give --worker-bandwidth, too")
        return machine
    if (options.gpu_price is None) is not (options.worker_price is None):
        raise UsageError("throughput per cost needs both --gpu-price and --worker-price")
    usual = get_host(_USUAL)
    cores = ceil(usual.cores * gb_per_s * GB / usual.memory_bytes_per_s)
    memory_bytes = int(_or(options.worker_memory_gib, MEMORY_GIB) * GIB)
    kind = replace(usual, memory_bytes=memory_bytes, memory_bytes_per_s=gb_per_s * GB, cores=cores)
    link = Link(
        _or(options.link_gbit_per_s, LINK_GBIT_PER_S) * 1e9 / 8, _or(options.latency_us, LATENCY_US) / 1e3
    )
    count = len(requests)
    load = SteadyLoad(
        min(count, limits.max_batch_requests),
        sum(request.prompt_tokens for request in requests) / count,
        sum(request.output_tokens for request in requests) / count,
    )
    config, dtype = machine.config, machine.dtype
    wanted = workers_wanted(machine.cost, kind, link, config, dtype, load)
    number = options.workers or wanted
    if number is None:
        raise UsageError("no number of such workers keeps up with this GPU: say how many with --workers")
    workers = Workers(min(number, _MOST_WORKERS), kind, link)
    cpu_tokens = options.cpu_cache_tokens or workers.kv_tokens(config, dtype)
    return replace(
        machine,
        cost=with_workers(machine.cost, workers, config, dtype),
        budget=KVBudget(machine.budget.gpu_tokens, cpu_tokens),
        fleet=Fleet(workers, wanted, options.gpu_price, options.worker_price),
    )


def _or(value: float | None, usual: float) -> float:
    return usual if value is None else value
