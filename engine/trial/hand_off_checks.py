"""Everything that is handed over between GPU and CPU, with random delays on both sides.

device   |kernel, pause|                                  |kernel, pause|
to-host                 |copy|flag
(CPU)                              |pause, compute|flag
to-device                                          |copy|
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from neo_desktop.engine.cuda.streams import open_streams
from neo_desktop.engine.doctor.outcome import CheckError, Figures
from neo_desktop.engine.execute.graphs.streams import CudaRunner, Lane, Mark, Recorder, Runner, check_flags
from neo_desktop.engine.execute.lanes import Lanes
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv.storage import KVPool
from neo_desktop.engine.kv.transfer import Carrier
from neo_desktop.engine.trial.check import Check
from neo_desktop.engine.trial.rig import Rig, on_rungs
from neo_desktop.native.relay import DONE, READY, Relay, RelayBatch, RelayLayer, empty_flags

DEADLINE_S = 40.0
CHAIN = 24  # hand-overs in a row, as in an iteration over so many layers
PROGRAMS = 4  # each with pauses of its own
SECONDS = {False: 5.0, True: 1.0}  # of stress; whether it is a first start
MODULUS = 10_007
MOST_PAUSE_S = 0.002
PAUSE_CYCLES = 1_000_000  # of a GPU: half a millisecond or so

N = TypeVar("N", int, Tensor)
Pause = Callable[[random.Random], None]  # on the device


def hand_off_checks(rig: Rig) -> Iterator[Check]:
    """Yield the checks of flags, graphs, streams and memory; for a GPU."""
    yield Check(
        "graphs-host-flags",
        "Graphs that hand over to the CPU and back, with random delays",
        "graphs",
        "host-flags",
        DEADLINE_S,
        lambda: check_graph_flags(rig, _runner(rig), _pause),
    )
    yield Check(
        "graphs-relay",
        "CPU attention in the middle of a graph",
        "graphs",
        "host-flags",
        DEADLINE_S,
        lambda: check_relay(rig, _runner(rig), _pause),
    )
    yield Check(
        "graphs-device-only",
        "Graphs, captured and replayed with other numbers",
        "graphs",
        "device-only",
        DEADLINE_S,
        lambda: check_replay(rig, _runner(rig)),
    )
    yield Check(
        "graphs-eager",
        "Streams that wait for each other and for the CPU, with random delays",
        "graphs",
        "eager",
        DEADLINE_S,
        lambda: check_lanes(rig, _pause),
    )
    for rung in ("pinned", "pageable"):
        yield Check(
            f"host_memory-{rung}",
            f"Copies between GPU and host memory, {rung}",
            "host_memory",
            rung,
            DEADLINE_S,
            partial(check_copies, rig, rung),
        )
    yield Check("swap", "KV moved to host memory and back", None, None, DEADLINE_S, lambda: check_swap(rig))


def check_graph_flags(rig: Rig, runner: Runner, pause: Pause) -> Figures:
    """Flags arrive on both sides, at once and from graphs, for as long as the stress takes."""
    pinned = rig.device.type == "cuda"
    flags = empty_flags(CHAIN, pinned=pinned)
    check_flags(runner, flags[READY, 0, :1])
    numbers = torch.zeros(1024, dtype=torch.int64, device=rig.device)
    sent, answer = (torch.zeros(1024, dtype=torch.int64, pin_memory=pinned) for _ in range(2))
    rig.synchronize()  # the program's streams do not wait for this one
    began = time.perf_counter()
    runs, expected = 0, 0
    while time.perf_counter() - began < SECONDS[rig.subject.is_quick] or runs < 2 * PROGRAMS:
        seed = runs % PROGRAMS
        flags.zero_()
        host = threading.Thread(target=_answer, args=(flags, sent, answer, random.Random(runs)), daemon=True)
        host.start()
        runner.start(seed, partial(_chain, numbers, sent, answer, flags, seed, pause))
        runner.wait()
        host.join()
        for layer in range(CHAIN):
            expected = _computed(expected + 1, layer)
        if not torch.equal(numbers.cpu(), torch.full((1024,), expected)):
            raise CheckError("what came back through flags is not what was sent", {"runs": runs})
        runs += 1
    runner.forget()
    return {"runs": runs, "hand_overs": runs * CHAIN}


def _chain(
    numbers: Tensor, sent: Tensor, answer: Tensor, flags: Tensor, seed: int, pause: Pause, recorder: Recorder
) -> None:
    rng = random.Random(seed)
    arrived: tuple[Mark, ...] = ()

    def compute() -> None:
        pause(rng)
        numbers.add_(1)

    for layer in range(CHAIN):
        stage = Stage("hand-off", layer, 0, 1)
        made = recorder.run(Lane.DEVICE, stage, compute, arrived)
        recorder.run(Lane.TO_HOST, stage, lambda: sent.copy_(numbers, non_blocking=True), (made,))
        asked = recorder.raise_flag(Lane.TO_HOST, flags[READY, layer, :1])
        recorder.wait_for_flag(Lane.TO_DEVICE, flags[DONE, layer, :1], asked)
        copy = partial(numbers.copy_, answer, non_blocking=True)
        arrived = (recorder.run(Lane.TO_DEVICE, stage, copy),)
    recorder.run(Lane.DEVICE, Stage("end", CHAIN, 0, 1), lambda: None, arrived)


def _answer(flags: Tensor, sent: Tensor, answer: Tensor, rng: random.Random) -> None:
    """The CPU's side: look at a flag, take a while, raise the other."""
    for layer in range(CHAIN):
        while flags[READY, layer, 0].item() != 1:
            time.sleep(0)
        if rng.random() < 0.3:
            time.sleep(rng.random() * MOST_PAUSE_S)
        answer.copy_(_computed(sent, layer))
        flags[DONE, layer, 0] = 1


def _computed(numbers: N, layer: int) -> N:
    return (numbers * 3 + layer) % MODULUS


def check_relay(rig: Rig, runner: Runner, pause: Pause) -> Figures:
    """The native relay attends in the middle of programs of several sizes; requests see themselves alone."""
    config, pinned = rig.config, rig.device.type == "cuda"
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    runs = 0
    for requests in (1, 5, 40):
        cache = torch.zeros(requests, kv_heads, 1, head_dim)
        relay = Relay(
            [RelayLayer(cache, cache.clone(), None, None, window=0)] * CHAIN, block_size=1, scale=1.0
        )
        qkv = torch.zeros(requests, heads + 2 * kv_heads, head_dim, device=rig.device)
        out = torch.empty(requests, heads, head_dim, device=rig.device)
        sent = torch.empty(qkv.shape, pin_memory=pinned)
        answer = torch.empty(out.shape, pin_memory=pinned)
        flags = empty_flags(CHAIN, pinned=pinned)
        batch = RelayBatch(
            q=sent[:, :heads],
            k=sent[:, heads : heads + kv_heads],
            v=sent[:, heads + kv_heads :],
            out=answer,
            block_tables=torch.arange(requests, dtype=torch.int32).unsqueeze(1),
            context_lens=torch.ones(requests, dtype=torch.int32),
            flags=flags,
        )
        rig.synchronize()  # as above
        program = partial(_relay_chain, qkv, out, sent, answer, flags, requests, pause)
        for number in range(1, 6):  # at once, and then as a graph
            relay.start([batch], DEADLINE_S / 2)
            try:
                runner.start(requests, program)
                runner.wait()
            except BaseException:
                relay.cancel()
                raise
            relay.finish()
            runs += 1
            if (
                not float((out.cpu() - number * CHAIN).abs().max()) < 0.01
            ):  # layers count; all else is rounding
                raise CheckError("what came back from CPU attention is not what was sent", {"runs": runs})
    runner.forget()
    return {"runs": runs, "hand_overs": runs * CHAIN}


def _relay_chain(
    qkv: Tensor,
    out: Tensor,
    sent: Tensor,
    answer: Tensor,
    flags: Tensor,
    seed: int,
    pause: Pause,
    recorder: Recorder,
) -> None:
    rng = random.Random(seed)
    arrived: tuple[Mark, ...] = ()

    def compute() -> None:
        pause(rng)
        qkv.add_(1)

    for layer in range(CHAIN):
        stage = Stage("hand-off", layer, 0, len(qkv))
        made = recorder.run(Lane.DEVICE, stage, compute, arrived)
        recorder.run(Lane.TO_HOST, stage, lambda: sent.copy_(qkv, non_blocking=True), (made,))
        asked = recorder.raise_flag(Lane.TO_HOST, flags[READY, layer, :1])
        recorder.wait_for_flag(Lane.TO_DEVICE, flags[DONE, layer, :1], asked)
        copy = partial(out.copy_, answer, non_blocking=True)
        arrived = (recorder.run(Lane.TO_DEVICE, stage, copy),)
    recorder.run(Lane.DEVICE, Stage("end", CHAIN, 0, len(qkv)), lambda: None, arrived)


def check_replay(rig: Rig, runner: Runner) -> Figures:
    """A graph computes with what its memory holds when it is replayed."""
    x, weight = (torch.zeros(64, 64, device=rig.device) for _ in range(2))
    out = torch.zeros(64, 64, device=rig.device)

    def program(recorder: Recorder) -> None:
        recorder.run(Lane.DEVICE, Stage("product", 0, 0, 64), lambda: torch.mm(x, weight, out=out))

    for run in range(1, 6):
        x.fill_(run)
        weight.fill_(run + 1)
        rig.synchronize()
        runner.start("replay", program)
        runner.wait()
        if not torch.equal(out.cpu(), torch.full((64, 64), 64.0 * run * (run + 1))):
            raise CheckError("a graph that was replayed computed something else", {"runs": run})
    runner.forget()
    return {"runs": 5}


def check_lanes(rig: Rig, pause: Pause) -> Figures:
    """Work that is launched piece by piece, and a thread of the CPU, wait for each other."""
    lanes = Lanes.for_device(open_streams(rig.device, rig.subject.gpu_slice), None)
    rng = random.Random(0)
    numbers = torch.zeros(1024, dtype=torch.int64, device=rig.device)
    staged = torch.zeros(1024, dtype=torch.int64, pin_memory=rig.device.type == "cuda")
    expected = 0

    def compute(layer: int) -> None:
        if rng.random() < 0.3:
            time.sleep(rng.random() * MOST_PAUSE_S)
        staged.copy_(_computed(staged, layer))

    try:
        for layer in range(8 * CHAIN):
            stage = Stage("hand-off", layer, 0, 1)
            pause(rng)
            numbers.add_(1)
            send = partial(staged.copy_, numbers, non_blocking=True)
            sent = lanes.to_host.submit(stage, send, (lanes.device.mark(),))
            computed = lanes.cpu.submit(stage, partial(compute, layer), (sent,))
            send_back = partial(numbers.copy_, staged, non_blocking=True)
            lanes.device.wait(lanes.to_device.submit(stage, send_back, (computed,)))
            expected = _computed(expected + 1, layer)
        lanes.join()
        if not torch.equal(numbers.cpu(), torch.full((1024,), expected)):
            raise CheckError("what came back over streams is not what was sent")
    finally:
        lanes.close()
    return {"hand_overs": 8 * CHAIN}


def check_copies(rig: Rig, rung: str) -> Figures:
    """Copies of several sizes, both ways, while others are under way."""
    pinned = rung == "pinned" and rig.device.type == "cuda"
    is_gpu = rig.device.type == "cuda"
    with on_rungs({"host_memory": rung}):
        for size in (1, 4097, 1 << 20, 1 << 24):
            source = torch.arange(size, dtype=torch.int32)
            there = torch.empty(size, dtype=torch.int32, device=rig.device)
            host, back = (torch.empty(size, dtype=torch.int32, pin_memory=pinned) for _ in range(2))
            host.copy_(source)
            stream = torch.cuda.stream(_stream(rig)) if is_gpu else nullcontext()
            with stream:
                there.copy_(host, non_blocking=True)
                there.add_(1)
                back.copy_(there, non_blocking=True)
                rig.synchronize()
            if not torch.equal(back, source + 1):
                raise CheckError("numbers were lost on their way over the bus", {"bytes": 4 * size})
    ms = rig.milliseconds(lambda: back.copy_(there, non_blocking=True))
    return {"ms": ms, "bytes": back.nbytes}


def check_swap(rig: Rig) -> Figures:
    """KV of the device comes back from host memory as it was."""
    config, tokens = rig.one_layer(), 8 * BLOCK_SIZE
    there, host = (
        KVPool(config, 16, BLOCK_SIZE, rig.dtype, device).layer(0)
        for device in (rig.device, torch.device("cpu"))
    )
    shape = (2, tokens, config.num_kv_heads, config.head_dim)
    given = torch.randn(shape).to(rig.dtype)
    rows = given.to(rig.device)
    first, other = torch.randperm(16 * BLOCK_SIZE)[: 2 * tokens].view(2, -1)
    there.write(rows[0], rows[1], first.to(rig.device))
    carrier = Carrier(config, rig.dtype, rig.device)
    carrier.copy(there, first.to(rig.device), host, first)
    carrier.copy(host, first, there, other.to(rig.device))
    found = torch.empty_like(rows)
    there.read(other.to(rig.device), found)
    if not torch.equal(found.cpu(), given):
        raise CheckError("KV that was moved to host memory came back with other values")
    return {"bytes": rows.nbytes}


def _stream(rig: Rig) -> torch.cuda.Stream:
    return open_streams(rig.device, rig.subject.gpu_slice).stream()


def _runner(rig: Rig) -> CudaRunner:
    streams = open_streams(rig.device, rig.subject.gpu_slice)
    return CudaRunner({lane: streams.stream() for lane in Lane}, None)


def _pause(rng: random.Random) -> None:
    """Keep the device's current stream busy for a random while."""
    if rng.random() < 0.3:
        torch.cuda._sleep(int(rng.random() * PAUSE_CYCLES))  # type: ignore[no-untyped-call]
