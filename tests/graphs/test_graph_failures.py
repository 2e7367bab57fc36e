"""A failure in an iteration on a GPU is reported, worked around, or ends the engine; nothing is lost."""

import threading
from typing import NoReturn

import pytest
import torch
from fallback_levels import Levels
from graph_case import contexts, decodes, make_executor, prompts
from imitated_streams import ImitatedBackend, StallingBackend
from pipeline_case import check_result, tiny_model

from neo_desktop.engine.batch import DeviceMemoryError
from neo_desktop.engine.cuda.copies import wait_for_gpu
from neo_desktop.engine.cuda.errors import (
    DeviceLostError,
    DeviceStalledError,
    EngineLostError,
    StageStalledError,
    StreamMemoryError,
)
from neo_desktop.engine.execute import model_runner
from neo_desktop.engine.execute.graphs import AnyProgram
from neo_desktop.engine.execute.lane import Lane
from neo_desktop.engine.execute.timeline import Stage, Timeline
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.watchdog import Timeout, Watchdog
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import Dense
from neo_desktop.native.relay import Relay, RelayStalledError

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(scope="module")
def model() -> Decoder:
    """A model of two layers, one with a sliding window."""
    return tiny_model((None, 5), form=Dense(uses_tiles=False))


@pytest.mark.parametrize("lane", [Lane.DEVICE, Lane.TO_HOST, Lane.TO_DEVICE])
def test_whatever_fails_the_error_arrives_and_the_next_iteration_works(model: Decoder, lane: Lane) -> None:
    failing = False

    def hook(at: Lane, stage: Stage) -> None:
        if failing and at is lane and stage.layer == 1:
            raise ValueError(f"{stage.name} is broken")

    executor, backend = make_executor(model, hook=hook)
    executor.execute(prompts("acde"))
    plan = decodes("ac", "d")
    for failing in (True, False):
        if failing:
            with pytest.raises(ValueError, match="is broken"):
                executor.execute(plan)
            assert backend.num_abandoned == 1
        else:
            check_result(model, plan, contexts(plan), executor.execute(plan))
    executor.close()


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), RuntimeError("Triton Error [CUDA]: out of memory")]
)
def test_without_memory_for_a_graph_iterations_go_on_piece_by_piece_for_a_while(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(model_runner, "PAUSE_ITERATIONS", 2)

    class Short(ImitatedBackend):
        is_short = False

        def start(self, program: AnyProgram, *, with_flags: bool, with_graphs: bool) -> bool:
            if self.is_short and with_graphs:
                raise error
            return super().start(program, with_flags=with_flags, with_graphs=with_graphs)

    backend = Short()
    executor, _ = make_executor(model, backend=backend)
    executor.execute(prompts("ac"))
    are_graphs = []
    for step in range(7):
        plan = decodes("ac", step=step)
        backend.is_short = step == 2
        check_result(model, plan, contexts(plan), executor.execute(plan))
        are_graphs.append(backend.was_graph)
    # Step 0 compiles; memory is short in step 2; the steps after it compile again.
    assert are_graphs == [False, True, False, False, False, True, True]
    executor.close()


def test_without_memory_and_graphs_whoever_plans_is_told(model: Decoder) -> None:
    is_short = False

    def hook(at: Lane, stage: Stage) -> None:
        if is_short:
            raise torch.OutOfMemoryError("no room")

    executor, _ = make_executor(model, hook=hook)
    executor.execute(prompts("ac"))
    is_short = True
    with pytest.raises(DeviceMemoryError, match="no room"):
        executor.execute(decodes("ac"))
    is_short = False
    plan = decodes("ac")
    check_result(model, plan, contexts(plan), executor.execute(plan))
    executor.close()


def test_an_iteration_that_stands_still_is_done_again_without_flags(
    model: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    backend = StallingBackend()
    executor, _ = make_executor(model, backend=backend, timeout=Timeout(1.0, 0.0))
    executor.execute(prompts("ac"))
    backend.is_stalling = True
    for step in range(2):
        plan = decodes("ac", step=step)
        check_result(model, plan, contexts(plan), executor.execute(plan))
        assert not backend.was_graph
    assert "the GPU did not hand over q, k and v for layer" in caplog.text
    for step in (2, 3):  # the device alone still uses graphs
        executor.execute(decodes("a", step=step))
    assert backend.was_graph
    executor.close()


def test_a_step_that_does_not_end_ends_the_engine_before_its_memory_is_somebody_elses(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, _ = make_executor(model)
    executor.execute(prompts("ac"))

    def give_up(_: Relay) -> NoReturn:
        raise RelayStalledError("the CPU did not end its attention")

    monkeypatch.setattr(Relay, "finish", give_up)
    monkeypatch.setattr(Relay, "close", lambda _: False)  # as if a step never ended
    with pytest.raises(StageStalledError, match="the CPU did not end its attention"):
        executor.execute(decodes("ac"))
    executor.close()


@pytest.mark.parametrize(
    ("level", "are_graphs"),
    [("host-flags", (True, True, True)), ("device-only", (False, True, False)), ("eager", (False,) * 3)],
)
def test_every_rung_gives_the_same_tokens(
    model: Decoder, levels: Levels, level: str, are_graphs: tuple[bool, ...]
) -> None:
    """The level is set before the executor is made, or afterwards."""
    for forced in (True, False):
        levels(graphs=level if forced else "host-flags")
        executor, backend = make_executor(model)
        levels(graphs=level)
        executor.execute(prompts("abc"))
        for parts, is_graph in zip((("ac",), ("b",), ("a", "c")), are_graphs, strict=True):
            for step in range(2):
                plan = decodes(*parts, step=step)
                check_result(model, plan, contexts(plan), executor.execute(plan))
            assert backend.was_graph == is_graph
        executor.close()


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (StreamMemoryError("cuStreamWaitValue32 failed"), "device-only"),
        (RelayStalledError("the GPU did not answer"), "device-only"),
        (
            torch.AcceleratorError("CUDA error: operation not permitted in a capture"),
            "eager",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.parametrize("at_end", [False, True])
def test_a_graph_that_fails_is_done_again_one_rung_lower(
    model: Decoder, error: RuntimeError, level: str, at_end: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(ImitatedBackend):
        is_failing = False

        def start(self, program: AnyProgram, *, with_flags: bool, with_graphs: bool) -> bool:
            self.is_failing = with_flags
            if self.is_failing and not at_end:
                raise error
            return super().start(program, with_flags=with_flags, with_graphs=with_graphs)

        def wait(self) -> None:
            super().wait()
            if self.is_failing:
                raise error

    executor, _ = make_executor(model, backend=Failing())
    for plan in (prompts("ac"), *(decodes("ac", step=step) for step in range(3))):
        check_result(model, plan, contexts(plan), executor.execute(plan))
    assert fallbacks.level("graphs") == level
    assert [record.getMessage().count(str(error)) for record in caplog.records] == [1]
    executor.close()


def test_a_gpu_that_is_lost_is_not_worked_around(model: Decoder) -> None:
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    class Lost(ImitatedBackend):
        def wait(self) -> None:
            raise lost

    executor, _ = make_executor(model, backend=Lost())
    with pytest.raises(DeviceLostError, match="an illegal memory access was encountered") as raised:
        executor.execute(prompts("ac"))
    assert raised.value.__cause__ is lost
    assert "graphs" not in fallbacks.limits()
    executor.close()


class Unanswering(ImitatedBackend):
    """Backend whose GPU hangs from the third program on, until `num_waits` waits have timed out."""

    num_waits = 10**9

    def wait(self) -> None:
        try:
            self._wait_for_gpu()
        except DeviceStalledError:
            self._runs.popleft()
            raise
        super().wait()

    def abandon(self, error: BaseException) -> EngineLostError | None:
        try:
            self._wait_for_gpu()
        except DeviceStalledError as lost:
            self.num_abandoned += 1
            return lost
        return super().abandon(error)

    def _wait_for_gpu(self) -> None:
        def query() -> bool:
            return self.num_runs <= 2 or self.num_waits <= 0

        try:
            wait_for_gpu(query, Watchdog(0.3), "a graph")
        except DeviceStalledError:
            self.num_waits -= 1
            raise


@pytest.mark.parametrize("names", ["a", "ac"])
def test_a_gpu_that_no_longer_answers_ends_the_iteration_in_words_and_loses_the_executor(
    model: Decoder, names: str
) -> None:
    executor, backend = make_executor(model, backend=Unanswering())
    executor.execute(prompts(names))
    plan = decodes(names)
    check_result(model, plan, contexts(plan), executor.execute(plan))
    for _ in range(2):  # the second time without a wait
        with pytest.raises(DeviceStalledError, match=r"the GPU did not end a graph within 0\.3 s"):
            executor.execute(decodes(names, step=1))
    num_abandoned = backend.num_abandoned
    executor.close()
    assert backend.num_abandoned == num_abandoned  # no further wait
    assert not backend.is_closed


def test_a_gpu_that_goes_on_when_all_flags_are_raised_is_served_without_them(
    model: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Unanswering()
    backend.num_waits = 1
    executor, _ = make_executor(model, backend=backend)
    executor.execute(prompts("ac"))
    for step in range(3):
        plan = decodes("ac", step=step)
        check_result(model, plan, contexts(plan), executor.execute(plan))
    assert fallbacks.level("graphs") == "device-only"
    assert "the GPU did not end a graph within 0.3 s" in caplog.text
    executor.close()


@pytest.mark.parametrize("lane", [Lane.DEVICE, Lane.TO_HOST])
def test_closing_in_the_middle_of_an_iteration_ends_it(model: Decoder, lane: Lane) -> None:
    is_watching = False
    reached, gate = threading.Event(), threading.Event()

    def hook(at: Lane, stage: Stage) -> None:
        if is_watching and at is lane and stage.layer == 1:
            reached.set()
            assert gate.wait(60)

    executor, _ = make_executor(model, hook=hook)
    executor.execute(prompts("ac"))
    is_watching = True
    raised: list[RuntimeError] = []

    def run() -> None:
        try:
            executor.execute(decodes("ac"))
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert reached.wait(60)
    executor.close()
    gate.set()
    thread.join(60)
    assert len(raised) == 1
    assert "closed" in str(raised[0]) or "cancelled" in str(raised[0])
    with pytest.raises(RuntimeError, match="is closed"):
        executor.execute(decodes("ac"))
    executor.close()  # again


def test_the_timeline_shows_the_cpus_part(model: Decoder) -> None:
    timeline = Timeline()
    executor, _ = make_executor(model, timeline=timeline)
    executor.execute(prompts("acd"))
    timeline.take()
    executor.execute(decodes("a", "cd"))
    spans = [span for span in timeline.take() if span.lane == "cpu"]
    assert [(span.stage.layer, span.stage.sub_batch, span.stage.tokens) for span in spans] == [
        (0, 1, 2),
        (1, 1, 2),
    ]
    executor.close()


def test_of_a_single_graph_that_is_asked_for_the_cpus_part_is_recorded(model: Decoder) -> None:
    timeline = Timeline(max_spans=0, is_continuous=False)
    executor, _ = make_executor(model, timeline=timeline)
    executor.execute(prompts("abcde"))
    executor.execute(decodes("abc", "de"))
    assert timeline.last == ()
    timeline.record_next()
    executor.execute(decodes("abc", "de", step=1))
    recorded = timeline.last
    assert {span.lane for span in recorded} == {"cpu"}
    assert {span.stage.sub_batch for span in recorded} == {0, 1}
    executor.execute(decodes("abc", "de", step=2))
    assert timeline.last is recorded
    executor.close()
