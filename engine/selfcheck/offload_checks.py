"""Checks of transfers and signals between GPU and CPU, with random delays.

device   |pause, kernel|                            |pause, kernel|
to-host                 |copy|flag
(CPU)                              |attend|flag
to-device                                     |copy|
"""

import random
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from neo_desktop.engine.batch import BlockCopy
from neo_desktop.engine.cuda.streams import open_streams, own_stream
from neo_desktop.engine.doctor.outcome import CheckError, Figures
from neo_desktop.engine.execute.backend import Backend, open_backend
from neo_desktop.engine.execute.build import check_flags
from neo_desktop.engine.execute.lane import Lane, Launcher
from neo_desktop.engine.execute.moves import Moves
from neo_desktop.engine.execute.round_trips import SmallProgram
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.execute.transfers import TransferMemory
from neo_desktop.engine.kv.layer import slots_of
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv.storage import KVPool, KVStorage, memory_of
from neo_desktop.engine.kv_tier import MEASURED_TIERS
from neo_desktop.engine.profiling.offload import OffloadChain
from neo_desktop.engine.selfcheck.check import Check
from neo_desktop.engine.selfcheck.rig import Rig, on_levels
from neo_desktop.native.relay import empty_flags

DEADLINE_S = 40.0
CHAIN = 24  # consecutive round trips, as in an iteration over 24 layers
REQUESTS = (1, 5, 40)  # each in programs of their own
LEAST_RUNS = 3  # of a program: launched, captured, launched as a graph
SECONDS = {False: 5.0, True: 1.0}  # the stress lasts; True: at the first start
PAUSE_CYCLES = 1_000_000  # about half a millisecond on a GPU

Pause = Callable[[random.Random], None]  # on the device


def offload_checks(rig: Rig) -> Iterator[Check]:
    """Yield the checks of flags, graphs, streams and memory, for a GPU."""

    def trips(*, in_graphs: bool) -> Figures:
        return check_trips(rig, _backend(rig), _pause, in_graphs=in_graphs)

    def check(title: str, mechanism: str, level: str, run: Callable[[], Figures]) -> Check:
        return Check(f"{mechanism}-{level}", title, mechanism, level, DEADLINE_S, run)

    title = "Graphs with CPU attention, with random delays"
    yield check(title, "graphs", "host-flags", partial(trips, in_graphs=True))
    title = "Graphs, captured and replayed with other data"
    yield check(title, "graphs", "device-only", lambda: check_replay(rig, _backend(rig)))
    title = "Streams that wait for each other and for the CPU, with random delays"
    yield check(title, "graphs", "eager", partial(trips, in_graphs=False))
    for level in ("pinned", "pageable"):
        title = f"Copies between GPU and host memory, {level}"
        yield check(title, "host_memory", level, partial(check_copies, rig, level))
    title = "KV moved to host memory and back"
    yield Check("swap", title, None, None, DEADLINE_S, partial(check_swap, rig))


def check_trips(rig: Rig, backend: Backend, pause: Pause, *, in_graphs: bool) -> Figures:
    """Send q, k and v to the CPU and outputs back, for the duration of the stress test.

    Args:
        in_graphs: the native relay attends, for launched work and then within graphs; otherwise a thread
            answers.
    """
    config, rng, runs = rig.config, random.Random(0), 0
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    if in_graphs:
        check_flags(backend, empty_flags(1, pinned=rig.device.type == "cuda")[:, 0])
    chains = [OffloadChain(rig.device, count, heads, CHAIN, partial(pause, rng)) for count in REQUESTS]
    began = time.perf_counter()
    while time.perf_counter() - began < SECONDS[rig.subject.is_quick] or runs < LEAST_RUNS * len(chains):
        chain = chains[runs % len(chains)]
        chain.run(backend, DEADLINE_S / 2, in_graph=in_graphs)
        runs += 1
        if chain.has_lost:
            raise CheckError("data from the CPU differs from the data sent", {"runs": runs})
    backend.forget()
    backend.close()
    return {"runs": runs, "offload_buffers": runs * CHAIN}


def _carry_out(backend: Backend, program: SmallProgram, *, in_graphs: bool) -> None:
    """Run a program after this thread's work on the device."""
    with backend.on_device():
        backend.start(program, with_flags=in_graphs, with_graphs=in_graphs)
        backend.wait()


def check_replay(rig: Rig, backend: Backend) -> Figures:
    """Check that a replayed graph uses the current content of its memory."""
    x, weight = (torch.zeros(64, 64, device=rig.device) for _ in range(2))
    out = torch.zeros(64, 64, device=rig.device)

    def record(launcher: Launcher) -> None:
        launcher.run(Lane.DEVICE, Stage("product", 0, 0, 64), lambda: torch.mm(x, weight, out=out))

    for run in range(1, 6):
        x.fill_(run)
        weight.fill_(run + 1)
        _carry_out(backend, SmallProgram("replay", record), in_graphs=True)
        if not torch.equal(out.cpu(), torch.full((64, 64), 64.0 * run * (run + 1))):
            raise CheckError("a replayed graph computed wrong values", {"runs": run})
    backend.forget()
    return {"runs": 5}


def check_copies(rig: Rig, level: str) -> Figures:
    """Check copies of several sizes, in both directions, during other copies."""
    pinned = level == "pinned" and rig.device.type == "cuda"
    with on_levels({"host_memory": level}):
        for size in (1, 4097, 1 << 20, 1 << 24):
            source = torch.arange(size, dtype=torch.int32)
            there = torch.empty(size, dtype=torch.int32, device=rig.device)
            host, back = (torch.empty(size, dtype=torch.int32, pin_memory=pinned) for _ in range(2))
            host.copy_(source)
            with own_stream(open_streams(rig.device, rig.subject.gpu_slice))():
                there.copy_(host, non_blocking=True)
                there.add_(1)
                back.copy_(there, non_blocking=True)
            if not torch.equal(back, source + 1):
                raise CheckError("data was lost on the bus", {"bytes": 4 * size})
    ms = rig.milliseconds(lambda: back.copy_(there, non_blocking=True))
    return {"ms": ms, "bytes": back.nbytes}


def check_swap(rig: Rig) -> Figures:
    """Check that KV returns unchanged from host memory, in other blocks."""
    config, (near, far) = rig.one_layer(), MEASURED_TIERS
    pools = {
        place: KVPool(
            config,
            16,
            BLOCK_SIZE,
            rig.dtype,
            memory_of(place, rig.device),
            sinks=None if rig.sinks is None else [rig.sinks],
        )
        for place in MEASURED_TIERS
    }
    given = torch.randn(pools[near].rows_shape(8 * BLOCK_SIZE)).to(rig.dtype).to(rig.device)
    first, other = torch.randperm(16).view(2, -1)
    layer = pools[near].layer(0)
    layer.write(given[0], given[-1], slots_of(first, BLOCK_SIZE).to(rig.device))
    memory = TransferMemory(config, rig.dtype, rig.device)
    copies = [BlockCopy(near, a, far, b) for a, b in zip(first.tolist(), other.tolist(), strict=True)]
    copies += [BlockCopy(far, block, near, block) for block in other.tolist()]
    backend = _backend(rig)
    moves = Moves(KVStorage(pools).copy_groups(copies), memory)

    def record(launcher: Launcher) -> None:
        moves.fetch(launcher, 0)
        launcher.wait(moves.fetched(0))

    _carry_out(backend, SmallProgram("swap", record), in_graphs=False)
    backend.close()
    returned = torch.empty_like(given)
    layer.read(slots_of(other, BLOCK_SIZE).to(rig.device), returned)
    if not torch.equal(returned, given):
        raise CheckError("KV came back from host memory with other values")
    return {"bytes": given.nbytes}


def _backend(rig: Rig) -> Backend:
    return open_backend(open_streams(rig.device, rig.subject.gpu_slice))


def _pause(rng: random.Random) -> None:
    """Keep the device's current stream busy for a random while."""
    if rng.random() < 0.3:
        torch.cuda._sleep(int(rng.random() * PAUSE_CYCLES))  # type: ignore[no-untyped-call]
