"""A worker receives rows before it has answered earlier ones, and each answer reaches its rows."""

import threading
from concurrent.futures import CancelledError
from contextlib import ExitStack

import pytest
import torch
from executors import thread_executor
from pipeline_case import BLOCK_SIZE, check_result, make_storage, sampling_input, tiny_model
from workers import SECRET, running_worker, shape_of, with_workers

from neo_desktop.engine.batch import IterationPlan, ScheduledSequence, SubBatch
from neo_desktop.engine.execute.lane import HostTask
from neo_desktop.engine.execute.lanes import WorkerLane
from neo_desktop.engine.execute.timeline import Stage, Timeline
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.kv.host_layer import HostLayer
from neo_desktop.engine.kv.layer import DecodeRows
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.remote.link import Address, Trust, WorkerLink, WorkerLostError
from neo_desktop.models.decoder import Decoder

NUM_BLOCKS = 24
ONE, TWO = KVTier.worker(1), KVTier.worker(2)
TIMEOUT_S = 60.0  # for prompt events; only a defect waits this long


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model()


class Gate:
    """Blocks the attention of workers in this process; the output is a copy of the queries."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.opened = threading.Semaphore(0), threading.Event()
        gate = self

        def decode(self: HostLayer, rows: DecodeRows) -> None:
            gate.begun.release()
            assert gate.opened.wait(TIMEOUT_S)
            rows.out.copy_(rows.q)

        monkeypatch.setattr(HostLayer, "decode", decode)


def test_a_worker_takes_the_next_rows_in_while_it_attends(
    stack: ExitStack, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows exceed the system's buffers: without a reader the second rows would not leave."""
    gate, config = Gate(monkeypatch), model.config
    _, address = stack.enter_context(running_worker())
    link = WorkerLink("worker-1", lambda: address, Trust(SECRET, TIMEOUT_S))
    link.open(shape_of(model, BLOCK_SIZE), None, NUM_BLOCKS)
    stack.callback(link.close)
    count = (1 << 24) // (config.num_heads * config.head_dim * 4)
    lens, tables = torch.ones(count, dtype=torch.int32), torch.zeros(count, 1, dtype=torch.int32)
    k = torch.zeros(count, config.num_kv_heads, config.head_dim)
    asked = [torch.randn(count, config.num_heads, config.head_dim) for _ in range(4)]
    for q in asked[:2]:
        link.ask(0, q, k, k, tables, lens)
    assert gate.begun.acquire(timeout=TIMEOUT_S)
    gate.opened.set()
    out = torch.empty_like(asked[0])
    for number, q in enumerate(asked):
        link.answer(out)
        assert torch.equal(out, q)
        if number + 2 < len(asked):
            link.ask(0, asked[number + 2], k, k, tables, lens)


def test_lanes_send_ahead_and_take_what_was_asked_for_also_if_the_iteration_is_given_up() -> None:
    lane, said = WorkerLane("worker-1"), []
    answers, gate = threading.Semaphore(0), threading.Event()

    stage = Stage("worker's attention", 0, 0, 1)

    def task(name: str, *, held: bool = False) -> HostTask:
        def ask(_: int) -> None:
            assert not held or gate.wait(TIMEOUT_S)
            said.append(f"ask {name}")

        def take(_: int) -> None:
            assert answers.acquire(timeout=TIMEOUT_S)
            said.append(f"take {name}")

        return HostTask("worker-1", lambda _: stage, take, ask=ask)

    lane.submit_step(task("a"), 0)
    lane.submit_step(task("b"), 0)
    lane.submit_step(task("c", held=True), 0)
    dropped = lane.submit_step(task("d"), 0)
    while len(said) < 2:
        assert not gate.wait(0.001)
    lane.cancel()
    gate.set()
    for _ in range(4):
        answers.release()
    with pytest.raises(CancelledError):
        dropped.wait()
    with pytest.raises(CancelledError):
        lane.join()
    asked = [each.removeprefix("ask ") for each in said if each.startswith("ask")]
    assert asked[:2] == ["a", "b"]
    assert "d" not in asked
    assert [each.removeprefix("take ") for each in said if each.startswith("take")] == asked
    lane.close()


def tokens_of(name: str) -> list[int]:
    return [(7 * ord(name) + 3 * i) % 257 for i in range(20)]


def plan_of(sub_batches: list[dict[str, KVTier]], start: int, end: int) -> IterationPlan:
    """Return a plan whose requests have blocks of their own."""

    def sequence(name: str, home: KVTier) -> ScheduledSequence:
        first = 3 * (ord(name) - ord("a"))
        blocks = IntArray(range(first, first + 3)).view()
        return ScheduledSequence(
            name, tuple(tokens_of(name)[start:end]), start, home, blocks, sampling_input(end)
        )

    batches = (SubBatch(tuple(sequence(name, home) for name, home in homes.items())) for homes in sub_batches)
    return IterationPlan(tuple(batches))


@pytest.mark.parametrize("last", range(1, 14, 3))
def test_answers_stay_with_their_rows_when_another_worker_is_lost(
    stack: ExitStack, model: Decoder, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """At any point of the iteration, the other worker answers a repeated request and gives the tokens."""
    workers = [stack.enter_context(running_worker()) for _ in range(2)]
    addresses: list[Address] = [address for _, address in workers]
    pools = make_storage(model, {KVTier.DEVICE: NUM_BLOCKS})
    storage = KVStorage(
        with_workers(model, {KVTier.DEVICE: pools[KVTier.DEVICE]}, addresses, NUM_BLOCKS, BLOCK_SIZE)
    )
    timeline = Timeline()
    executor = thread_executor(model, storage, timeline=timeline)
    stack.callback(executor.close)
    homes = [{"a": ONE, "b": TWO}, {"c": ONE, "d": TWO}]
    executor.execute(plan_of(homes, 0, 9))
    decode, count, lock = HostLayer.decode, 0, threading.Lock()

    def counted(self: HostLayer, *arguments: object) -> None:
        nonlocal count
        with lock:
            count += 1
            is_last = count == last
        if is_last:
            workers[0][0].close()
        decode(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(HostLayer, "decode", counted)
    with pytest.raises(WorkerLostError, match="worker-1 is lost"):
        executor.execute(plan_of(homes, 9, 10))
    rest = [{"b": TWO}, {"d": TWO}]
    for end in (10, 11):
        plan = plan_of(rest, end - 1, end)
        contexts = {name: tokens_of(name)[:end] for homes in rest for name in homes}
        check_result(model, plan, contexts, executor.execute(plan))
    lanes = {span.lane for span in timeline.spans}
    assert {"worker-2", "worker-2 sends"} <= lanes
