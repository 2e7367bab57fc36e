"""Decode iterations as graphs give the tokens of a plain computation, whatever order the streams take."""

import threading
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from imitated_streams import Hook, ImitatedRunner, Operation
from ladder_rungs import Rungs, kernels_on
from pipeline_case import (
    check_result,
    make_storage,
    reference_logprobs,
    sampling_input,
    tiny_config,
    tiny_model,
)

from neo_desktop.engine.batch import GraphReach, IterationPlan, SamplingInput, ScheduledSequence, SubBatch
from neo_desktop.engine.cuda.errors import (
    DeviceLostError,
    DeviceStalledError,
    StageStalledError,
    StreamMemoryError,
)
from neo_desktop.engine.cuda.streams import WholeDevice
from neo_desktop.engine.cuda.waiting import wait_for_gpu
from neo_desktop.engine.execute.build import build_executor
from neo_desktop.engine.execute.graphs import program
from neo_desktop.engine.execute.graphs.bucket import Bucket, Most
from neo_desktop.engine.execute.graphs.executor import GraphExecutor
from neo_desktop.engine.execute.graphs.streams import Lane, Program
from neo_desktop.engine.execute.graphs.workspace import Workspace
from neo_desktop.engine.execute.pipeline import PipelineExecutor
from neo_desktop.engine.execute.timeline import Stage, Timeline
from neo_desktop.engine.grammar import GrammarCompiler, from_regex
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.kernels import dispatch, in_torch
from neo_desktop.engine.ladder import ladder
from neo_desktop.engine.placement import PLACES, Place
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.waiting import Watch
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import Dense
from neo_desktop.models.tokenizer import ByteTokenizer
from neo_desktop.native.relay import Relay, RelayStalledError

BLOCK_SIZE = 16
NUM_BLOCKS = 24
MOST = Most(rows=8, blocks=64)
EMPTY = IntArray().view()
PLAIN = Dense(uses_onednn=False)  # as weights lie on a GPU


@pytest.fixture(scope="module", params=["triton", "torch"], autouse=True)
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    with kernels_on(request.param):
        yield


@pytest.fixture(scope="module")
def model() -> Decoder:
    """Two layers, one with a window."""
    return tiny_model((None, 5), form=PLAIN)


def make_executor(
    model: Decoder,
    seed: int = 0,
    hook: Hook | None = None,
    places: Collection[Place] = PLACES,
    runner: ImitatedRunner | None = None,
) -> tuple[GraphExecutor, ImitatedRunner]:
    storage = make_storage(model, dict.fromkeys(places, NUM_BLOCKS), BLOCK_SIZE)
    runner = runner or ImitatedRunner(seed, hook)
    pipeline = PipelineExecutor(model, storage)
    return GraphExecutor(model, storage, MOST, num_sms=8, runner=runner, pipeline=pipeline), runner


TOKENS = {name: [(7 * ord(name) + 3 * i) % 257 for i in range(40)] for name in "abcdefg"}
# Where each lives, its blocks, and how many tokens it has before the first decode.
HOMES = {
    "a": (Place.DEVICE, (0, 5), 20),
    "b": (Place.DEVICE, (2,), 3),
    "c": (Place.HOST, (8, 1), 16),
    "d": (Place.HOST, (0, 7), 25),
    "e": (Place.HOST, (3,), 1),
    "f": (Place.DEVICE, (9, 11), 17),
}


def sequence(name: str, start: int, end: int, sampling: SamplingInput | None = None) -> ScheduledSequence:
    place, blocks, _ = HOMES[name]
    tokens = tuple(TOKENS[name][start:end])
    return ScheduledSequence(
        name, tokens, start, place, IntArray(blocks).view(), sampling or sampling_input(end)
    )


def prompts(names: str) -> IterationPlan:
    ordered = sorted(names, key=lambda name: PLACES.index(HOMES[name][0]))
    return IterationPlan((SubBatch(tuple(sequence(name, 0, HOMES[name][2]) for name in ordered)),))


def decodes(*names: str, step: int = 0, sampling: SamplingInput | None = None) -> IterationPlan:
    """The tokens after the prompts: sub-batches of these names."""

    def one(name: str) -> ScheduledSequence:
        start = HOMES[name][2] + step
        return sequence(name, start, start + 1, sampling)

    return IterationPlan(tuple(SubBatch(tuple(one(name) for name in part)) for part in names))


def contexts(plan: IterationPlan) -> dict[str, list[int]]:
    return {s.request_id: TOKENS[s.request_id][: s.context_len] for s in plan.sequences}


@pytest.mark.parametrize("seed", range(3))
def test_decodes_in_both_places_and_sub_batches(model: Decoder, seed: int) -> None:
    executor, runner = make_executor(model, seed)
    executor.execute(prompts("abcdef"))
    assert runner.num_runs == 0  # prompts are the pipeline's
    for step in range(2):
        plan = decodes("abcd", "fe", step=step)
        result = executor.execute(plan)
        check_result(model, plan, contexts(plan), result)
        assert result.timing is not None
        assert 0 < result.timing.cpu_attention_ms < result.timing.total_ms
        assert result.timing.is_graph
    assert (runner.num_runs, runner.num_programs) == (2, 1)
    executor.close()


def test_the_executor_tells_which_iterations_are_graphs(model: Decoder, rungs: Rungs) -> None:
    executor, _ = make_executor(model)
    assert executor.graph_reach == GraphReach(MOST.rows, with_host=True)
    assert make_executor(model, places=(Place.DEVICE,))[0].graph_reach == GraphReach(MOST.rows)
    plans = {"prompts": prompts("abcdef"), "decodes": decodes("ab"), "with CPU": decodes("ab", "dc", step=1)}
    expected = {
        "host-flags": {"prompts": False, "decodes": True, "with CPU": True},
        "device-only": {"prompts": False, "decodes": True, "with CPU": False},
        "eager": {"prompts": False, "decodes": False, "with CPU": False},
    }
    for rung, graphs in expected.items():
        rungs(graphs=rung)
        for name, plan in plans.items():
            timing = executor.execute(plan).timing
            assert timing is not None
            assert timing.is_graph == graphs[name]
            if name != "prompts":
                with_cpu = any(s.place == Place.HOST for s in plan.sequences)
                assert executor.graph_reach.holds(4, with_cpu) == graphs[name]
    executor.close()


@pytest.mark.parametrize("num_queues", range(1, 9))
def test_a_gpu_with_few_queues_neither_hangs_nor_errs(model: Decoder, num_queues: int) -> None:
    """CUDA puts nodes of a graph into any of its queues, each of which goes on in order."""
    runner = ImitatedRunner(num_queues, num_queues=num_queues)
    executor, _ = make_executor(model, runner=runner)
    executor.execute(prompts("abcdef"))
    for step in range(2):
        plan = decodes("abcd", "fe", step=step)
        check_result(model, plan, contexts(plan), executor.execute(plan))
    executor.close()


def test_every_wait_for_a_flag_comes_after_its_question_for_cuda_too(model: Decoder) -> None:
    executor, runner = make_executor(model)
    executor.execute(prompts("abcdef"))
    for parts in (("abcd", "fe"), ("ce",), ("ac", "d")):
        executor.execute(decodes(*parts))
    assert runner.check_flags(model.config.num_layers) == 2 * (2 + 1 + 2)
    executor.close()


@pytest.mark.parametrize("parts", [("abf",), ("cde",), ("cd", "e"), ("ac",), ("", "a")])
def test_one_place_or_one_sub_batch(model: Decoder, parts: tuple[str, ...]) -> None:
    """`gpu-only`, `fastdecode`, and one sub-batch whose CPU attention runs beside its own."""
    names = "".join(parts)
    executor, runner = make_executor(model, places={HOMES[name][0] for name in names})
    executor.execute(prompts(names))
    plan = decodes(*parts)
    check_result(model, plan, contexts(plan), executor.execute(plan))
    assert runner.num_runs == 1
    executor.close()


def test_a_graph_serves_smaller_iterations_and_what_was_there_before_does_not_matter(model: Decoder) -> None:
    executor, runner = make_executor(model)
    executor.execute(prompts("abcdef"))
    for step, names in enumerate(("abfcde", "afcde", "bfcde")):  # 3, 2 and 2 rows; 3 of the host
        plan = decodes(names, step=step if names == "abfcde" else 0)
        check_result(model, plan, contexts(plan), executor.execute(plan))
    assert runner.num_programs == 2
    executor.close()


def test_what_is_not_decodes_alone_or_too_large_is_the_pipelines(model: Decoder) -> None:
    executor, runner = make_executor(model)
    executor.execute(prompts("abcde"))
    mixed = IterationPlan((SubBatch((sequence("f", 0, 17), *decodes("ab").sub_batches[0].sequences)),))
    check_result(model, mixed, contexts(mixed), executor.execute(mixed))
    many = IterationPlan(
        (SubBatch(tuple(s._replace(request_id=f"{s.request_id}{i}") for i in range(9) for s in one("a"))),)
    )
    result = executor.execute(many)
    assert len({token.token_id for token in result.sampled.values()}) == 1
    assert runner.num_runs == 0
    executor.close()


def one(name: str) -> tuple[ScheduledSequence, ...]:
    return decodes(name).sub_batches[0].sequences


def test_every_kind_of_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases everywhere, norms of heads, an embedding of its own."""
    config = replace(
        tiny_config((None,)),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=True,
        tie_word_embeddings=False,
    )
    monkeypatch.setattr("pipeline_case.tiny_config", lambda windows: config)
    model = tiny_model((None,), form=PLAIN)
    executor, _ = make_executor(model)
    executor.execute(prompts("abcd"))
    plan = decodes("ac", "bd")
    check_result(model, plan, contexts(plan), executor.execute(plan))
    executor.close()


def test_warming_up_changes_nothing_that_is_stored(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cuts contexts once, and once it does not; the pools stay as they were."""
    storage = make_storage(model, dict.fromkeys(PLACES, NUM_BLOCKS), BLOCK_SIZE)
    runner = ImitatedRunner()
    pipeline = PipelineExecutor(model, storage)
    executor = GraphExecutor(model, storage, Most(2, 128), num_sms=4, runner=runner, pipeline=pipeline)
    decode, splits = program.paged_decode, []

    def recorded(*arguments: Any) -> None:
        splits.append(arguments[7].shape[2])
        decode(*arguments)

    monkeypatch.setattr(program, "paged_decode", recorded)
    executor.warm_up()
    assert runner.num_programs == 2
    assert min(splits) == 1 < max(splits)
    assert all(part.isnan().all() for place in PLACES for part in storage[place].parts)
    executor.execute(prompts("a"))
    plan = decodes("a")
    check_result(model, plan, contexts(plan), executor.execute(plan))
    executor.close()


def test_sampling_is_the_pipelines(model: Decoder) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.8, repetition_penalty=1.3, logprobs=2)
    inputs = SamplingInput(params, 5, 0, 21, IntArray((1, 2, 3)).view(), IntArray((4, 4)).view())
    plan = decodes("ac", "d", sampling=inputs)
    executor, runner = make_executor(model)
    pipeline = PipelineExecutor(model, make_storage(model, dict.fromkeys(PLACES, NUM_BLOCKS), BLOCK_SIZE))
    for each in (executor, pipeline):
        each.execute(prompts("acd"))
    sampled, expected = executor.execute(plan).sampled, pipeline.execute(plan).sampled
    assert runner.num_runs == 1
    assert sampled.keys() == expected.keys()
    for name, token in sampled.items():
        assert token.token_id == expected[name].token_id
        assert token.logprob is not None
        assert token.logprob.logprob == pytest.approx(expected[name].logprob.logprob, abs=1e-4)
    executor.close()
    pipeline.close()


def test_grammars_and_biases_are_obeyed_beside_greedy_requests(model: Decoder) -> None:
    vocab_size = model.config.vocab_size
    greedy = SamplingInput(SamplingParams(temperature=0.0), 0, 0, 21, EMPTY, EMPTY)
    compiler = GrammarCompiler(ByteTokenizer(), vocab_size, ())
    bound = greedy._replace(grammar=compiler.start(from_regex("z")))
    compiler.close()
    biased = greedy._replace(params=SamplingParams(temperature=0.0, logit_bias={77: 100.0}))
    executor, runner = make_executor(model)
    executor.execute(prompts("acd"))
    sequences = [
        decodes(name, sampling=sampling).sub_batches[0].sequences[0]
        for name, sampling in (("a", greedy), ("c", bound), ("d", biased))
    ]
    plan = IterationPlan((SubBatch(tuple(sequences)),))
    result = executor.execute(plan)
    assert runner.num_runs == 1
    best = int(reference_logprobs(model, contexts(plan)["a"]).argmax())
    assert {name: token.token_id for name, token in result.sampled.items()} == {
        "a": best,
        "c": ord("z"),
        "d": 77,
    }
    executor.close()


def test_greedy_tokens_come_without_reading_logits(model: Decoder) -> None:
    greedy = SamplingInput(SamplingParams(temperature=0.0), 0, 0, 21, EMPTY, EMPTY)
    executor, _ = make_executor(model)
    executor.execute(prompts("ac"))
    plan = decodes("a", "c", sampling=greedy)
    result = executor.execute(plan)
    for name, context in contexts(plan).items():
        assert result.sampled[name].token_id == int(reference_logprobs(model, context).argmax())
    executor.close()


def test_logits_that_are_not_finite_end_their_request_alone(model: Decoder) -> None:
    executor, _ = make_executor(model)
    executor.execute(prompts("abc"))
    plan = decodes("ab", "c", sampling=SamplingInput(SamplingParams(temperature=0.0), 0, 0, 21, EMPTY, EMPTY))
    embedding = model.embedding
    model.embedding = embedding.clone()
    model.embedding[TOKENS["b"][HOMES["b"][2]]] = torch.nan
    try:
        result = executor.execute(plan)
    finally:
        model.embedding = embedding
    assert result.sampled.keys() == {"a", "c"}
    assert "not finite" in result.failed["b"]
    executor.close()


def test_a_wait_that_is_missing_shows(model: Decoder) -> None:
    """The imitated streams would find it: without the events, some order gives other tokens."""

    class Forgetful(ImitatedRunner):
        def _carry_out(self, operations: Sequence[Operation]) -> None:
            forgetting = [replace(operation, after=()) for operation in operations]
            super()._carry_out(forgetting)

    plan = decodes("abcd", "fe")
    for seed in range(20):
        executor, runner = make_executor(model, runner=Forgetful(seed))
        executor.execute(prompts("abcdef"))
        try:
            check_result(model, plan, contexts(plan), executor.execute(plan))
        except AssertionError:
            return
        finally:
            executor.close()
        assert runner.num_runs == 1
    pytest.fail("no order showed that nothing waits")


@pytest.mark.parametrize("lane", list(Lane))
def test_whatever_fails_the_error_arrives_and_the_next_iteration_works(model: Decoder, lane: Lane) -> None:
    failing = False

    def hook(at: Lane, stage: Stage) -> None:
        if failing and at is lane and stage.layer == 1:
            raise ValueError(f"{stage.name} is broken")

    executor, runner = make_executor(model, hook=hook)
    executor.execute(prompts("acde"))
    plan = decodes("ac", "d")
    for failing in (True, False):
        if failing:
            with pytest.raises(ValueError, match="is broken"):
                executor.execute(plan)
            assert runner.num_settled == 1
        else:
            check_result(model, plan, contexts(plan), executor.execute(plan))
    executor.close()


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), RuntimeError("Triton Error [CUDA]: out of memory")]
)
def test_without_memory_for_a_graph_the_pipeline_goes_on_for_a_while(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("neo_desktop.engine.execute.graphs.executor.PAUSE_ITERATIONS", 2)
    is_short = True

    def hook(at: Lane, stage: Stage) -> None:
        if is_short:
            raise error

    executor, runner = make_executor(model, hook=hook)
    executor.execute(prompts("ac"))
    for step, num_runs in enumerate((1, 1, 1, 2)):
        plan = decodes("ac", step=step)
        check_result(model, plan, contexts(plan), executor.execute(plan))
        assert runner.num_runs == num_runs
        is_short = False
    assert runner.num_programs == 1
    executor.close()


def test_an_iteration_that_stands_still_is_done_again_by_the_pipeline(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("neo_desktop.engine.execute.graphs.executor.PATIENCE_S", 1.0)

    class Stalling(ImitatedRunner):
        def _carry_out(self, operations: Sequence[Operation]) -> None:
            """The GPU never comes to hand the second layer over; whoever waits for flags goes on."""
            raised = [o for o in operations if o.flag is not None and not o.is_wait]
            for lost in raised[1:2]:
                lost.carry_out = lambda: None
            super()._carry_out(operations)

    executor, runner = make_executor(model, runner=Stalling())
    executor.execute(prompts("ac"))
    for step in range(2):
        plan = decodes("ac", step=step)
        check_result(model, plan, contexts(plan), executor.execute(plan))
        assert runner.num_runs == 1
    assert "the GPU did not hand over q, k and v for layer" in caplog.text
    plan = decodes("a", step=2)  # on the device alone, graphs go on
    executor.execute(plan)
    assert runner.num_runs == 2
    executor.close()


def test_a_step_that_does_not_end_ends_the_engine_before_its_memory_is_somebody_elses(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, _ = make_executor(model)
    executor.execute(prompts("ac"))

    def give_up(_: Relay) -> NoReturn:
        raise RelayStalledError("the CPU did not end its attention")

    monkeypatch.setattr(Relay, "finish", give_up)
    monkeypatch.setattr(Relay, "close", lambda _: False)  # it is in its step for ever
    with pytest.raises(StageStalledError, match="the CPU did not end its attention"):
        executor.execute(decodes("ac"))
    executor.close()


@pytest.mark.parametrize("name", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_nor_may_another_error_hide_that_step(
    name: type[RuntimeError], model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, runner = make_executor(model)
    executor.execute(prompts("ac"))

    def refuse(*_: object) -> NoReturn:
        raise name("no such luck")

    def give_up(_: Relay) -> NoReturn:
        raise RelayStalledError("the CPU did not end its attention")

    monkeypatch.setattr(runner, "start", refuse)
    monkeypatch.setattr(Relay, "finish", give_up)
    monkeypatch.setattr(Relay, "close", lambda _: False)
    with pytest.raises(StageStalledError, match="the CPU did not end its attention"):
        executor.execute(decodes("ac"))
    executor.close()


@pytest.mark.parametrize(
    ("rung", "num_runs"), [("host-flags", (1, 2, 3)), ("device-only", (0, 1, 1)), ("eager", (0, 0, 0))]
)
def test_every_rung_gives_the_same_tokens(
    model: Decoder, rungs: Rungs, rung: str, num_runs: tuple[int, ...]
) -> None:
    """Forced before an executor is made, and when one limits itself in the middle of the work."""
    for forced in (True, False):
        ladder.put({"graphs": rung if forced else "host-flags"})
        executor, runner = make_executor(model)
        ladder.put({"graphs": rung})
        executor.execute(prompts("abc"))
        plans = decodes("ac"), decodes("b"), decodes("a", "c", step=1)
        for plan, count in zip(plans, num_runs, strict=True):
            check_result(model, plan, contexts(plan), executor.execute(plan))
            assert runner.num_runs == count
        executor.close()


@pytest.mark.parametrize(
    ("error", "rung"),
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
    model: Decoder, error: RuntimeError, rung: str, at_end: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(ImitatedRunner):
        def start(self, key: Hashable, program: Program) -> None:
            if not at_end:
                self.num_runs += 1
                raise error
            super().start(key, program)

        def wait(self) -> None:
            raise error

    executor, runner = make_executor(model, runner=Failing())
    executor.execute(prompts("ac"))
    for step in range(3):
        plan = decodes("ac", step=step)
        check_result(model, plan, contexts(plan), executor.execute(plan))
    assert runner.num_runs == 1
    assert ladder.rung("graphs") == rung
    assert [record.getMessage().count(str(error)) for record in caplog.records] == [1]
    executor.close()


def test_a_gpu_that_is_lost_is_not_worked_around(model: Decoder) -> None:
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    class Lost(ImitatedRunner):
        def wait(self) -> None:
            raise lost

    executor, _ = make_executor(model, runner=Lost())
    executor.execute(prompts("ac"))
    with pytest.raises(DeviceLostError, match="an illegal memory access was encountered") as raised:
        executor.execute(decodes("ac"))
    assert raised.value.__cause__ is lost
    assert "graphs" not in ladder.limits()
    executor.close()


def test_a_gpu_that_the_pipeline_has_lost_is_not_waited_for_at_the_end(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(pipeline: PipelineExecutor, plan: IterationPlan) -> None:
        raise DeviceStalledError("the GPU did not end its work")

    executor, runner = make_executor(model)
    monkeypatch.setattr(PipelineExecutor, "_submit", lose)
    with pytest.raises(DeviceStalledError):
        executor.execute(prompts("a"))
    executor.close()
    assert runner.num_settled == 0


def test_graphs_are_captured_again_when_their_kernels_change(model: Decoder, rungs: Rungs) -> None:
    executor, runner = make_executor(model)
    executor.execute(prompts("ab"))
    executor.execute(decodes("ab"))
    executor.execute(decodes("a"))
    assert runner.num_programs == 2
    rungs(norm="torch")
    executor.execute(decodes("ab", step=1))
    assert runner.num_programs == 1
    executor.close()


def test_attention_in_too_many_pieces_is_not_kept_in_graphs(
    model: Decoder, rungs: Rungs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rungs(paged_decode="torch")
    executor, runner = make_executor(model)
    executor.execute(prompts("ab"))
    monkeypatch.setattr(in_torch, "PIECE_BYTES", 1)  # a token at a time: 1024 of them have room in a table
    for most, num_runs in ((1023, 0), (1024, 1)):
        monkeypatch.setattr(dispatch, "MAX_PIECES_IN_GRAPH", most)
        plan = decodes("ab", step=num_runs)
        check_result(model, plan, contexts(plan), executor.execute(plan))
        assert runner.num_runs == num_runs
    executor.close()


class Unanswering(ImitatedRunner):
    """From the second program on the GPU does not end its work, until as many waits have been given up."""

    num_waits = 10**9

    def wait(self) -> None:
        def query() -> bool:
            return self.num_runs == 1 or self.num_waits <= 0

        try:
            wait_for_gpu(SimpleNamespace(query=query), Watch(0.3), "a graph")
        except DeviceStalledError:
            self.num_waits -= 1
            raise

    def settle(self) -> None:
        super().settle()
        self.wait()


@pytest.mark.parametrize("names", ["a", "ac"])
def test_a_gpu_that_no_longer_answers_ends_the_iteration_in_words_and_loses_the_executor(
    model: Decoder, names: str
) -> None:
    executor, runner = make_executor(model, runner=Unanswering())
    executor.execute(prompts(names))
    plan = decodes(names)
    check_result(model, plan, contexts(plan), executor.execute(plan))
    for _ in range(2):  # the second time at once
        with pytest.raises(DeviceStalledError, match=r"the GPU did not end a graph within 0\.3 s"):
            executor.execute(decodes(names, step=1))
    with pytest.raises(DeviceStalledError):  # nor can the pipeline do anything
        executor.execute(prompts("b"))
    num_settled = runner.num_settled
    executor.close()
    assert runner.num_settled == num_settled  # nobody waits for it again


def test_a_gpu_that_goes_on_when_all_flags_are_raised_is_served_without_them(
    model: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    runner = Unanswering()
    runner.num_waits = 1
    executor, _ = make_executor(model, runner=runner)
    executor.execute(prompts("ac"))
    for step in range(3):
        plan = decodes("ac", step=step)
        check_result(model, plan, contexts(plan), executor.execute(plan))
    assert runner.num_runs == 2
    assert ladder.rung("graphs") == "device-only"
    assert "the GPU did not end a graph within 0.3 s" in caplog.text
    executor.close()


@pytest.mark.parametrize("lane", [Lane.DEVICE, Lane.TO_HOST])
def test_closing_in_the_middle_of_an_iteration_ends_it(model: Decoder, lane: Lane) -> None:
    reached, gate = threading.Event(), threading.Event()

    def hook(at: Lane, stage: Stage) -> None:
        if at is lane and stage.layer == 1:
            reached.set()
            assert gate.wait(20)

    executor, _ = make_executor(model, hook=hook)
    executor.execute(prompts("ac"))
    raised: list[RuntimeError] = []

    def run() -> None:
        try:
            executor.execute(decodes("ac"))
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert reached.wait(20)
    executor.close()
    gate.set()
    thread.join(20)
    assert len(raised) == 1
    assert "closed" in str(raised[0]) or "cancelled" in str(raised[0])
    with pytest.raises(RuntimeError, match="is closed"):
        executor.execute(decodes("ac"))
    executor.close()  # again


def test_the_timeline_shows_the_cpus_part(model: Decoder) -> None:
    timeline = Timeline()
    storage = make_storage(model, dict.fromkeys(PLACES, NUM_BLOCKS), BLOCK_SIZE)
    pipeline = PipelineExecutor(model, storage, timeline)
    executor = GraphExecutor(
        model, storage, MOST, num_sms=8, runner=ImitatedRunner(), pipeline=pipeline, timeline=timeline
    )
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
    storage = make_storage(model, dict.fromkeys(PLACES, NUM_BLOCKS), BLOCK_SIZE)
    pipeline = PipelineExecutor(model, storage, timeline)
    executor = GraphExecutor(
        model, storage, MOST, num_sms=8, runner=ImitatedRunner(), pipeline=pipeline, timeline=timeline
    )
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


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(PLACES), st.integers(1, 3000)), max_size=70),
        min_size=1,
        max_size=2,
    )
)
def test_a_bucket_holds_its_plan_and_not_much_more(parts: list[list[tuple[Place, int]]]) -> None:
    sub_batches = tuple(
        SubBatch(
            tuple(
                ScheduledSequence(
                    f"{i}.{j}", (1,), 16 * blocks - 1, place, IntArray(range(blocks)).view(), None
                )
                for j, (place, blocks) in enumerate(part)
            )
        )
        for i, part in enumerate(parts)
    )
    bucket = Bucket.of(IterationPlan(sub_batches))
    filled = [part for part in parts if part]
    assert len(bucket.sub_batches) == len(filled)
    for rows, part in zip(bucket.sub_batches, filled, strict=True):
        for place, padded in ((Place.DEVICE, rows.device), (Place.HOST, rows.host)):
            count = sum(p == place for p, _ in part)
            assert count <= padded <= max(count * 1.5, count)
    longest = max((blocks for part in parts for place, blocks in part if place == Place.DEVICE), default=0)
    assert longest <= bucket.max_blocks <= max(2 * longest, 64)
    assert (bucket in Most.of(70, 3000 * 16, 16)) == all(rows.count <= 96 for rows in bucket.sub_batches)


def test_the_memory_of_a_workspace_is_known_beforehand() -> None:
    config = tiny_config((None,))
    for most in (Most(8, 64), Most(256, 1024)):
        workspace = Workspace(config, torch.float16, torch.device("cpu"), most, num_programs=32)
        tensors = [
            value
            for name, value in vars(workspace).items()
            if isinstance(value, torch.Tensor) and name not in ("_staged", "tokens")  # in host memory
        ]
        for part in (workspace._states[0].scratch, *workspace._states):
            values = (getattr(part, field.name) for field in fields(part))
            tensors += [value for value in values if isinstance(value, torch.Tensor)]
        taken = sum(tensor.nbytes for tensor in tensors)
        assert taken == pytest.approx(most.device_bytes(config, torch.float16), rel=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("parts", [("abf",), ("cde",), ("abcd", "fe"), ("ac", "d")])
def test_on_a_gpu_graphs_give_the_tokens_of_a_plain_computation(parts: tuple[str, ...]) -> None:
    model = tiny_model((None, 5), device="cuda")
    storage = make_storage(model, dict.fromkeys(PLACES, NUM_BLOCKS), BLOCK_SIZE)
    timeline = Timeline()
    executor = build_executor(model, storage, 8, timeline, WholeDevice(model.device))
    assert isinstance(executor, GraphExecutor)
    executor.execute(prompts("abcdef"))
    for step in range(4):  # at once, captured, and launched again
        plan = decodes(*parts, step=step)
        timeline.take()
        check_result(model, plan, contexts(plan), executor.execute(plan), tolerance=2e-3)
        spans = timeline.take()
        lanes = {"device", "cpu", "to-host", "to-device"} if set("cde") & set("".join(parts)) else {"device"}
        assert {span.lane for span in spans} == lanes
        assert all(span.end_ns >= span.start_ns for span in spans)
    executor.close()
