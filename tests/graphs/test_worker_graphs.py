"""Iterations with attention workers as graphs: the same tokens, and clean recovery from a lost worker."""

from contextlib import ExitStack
from dataclasses import replace

import pytest
from async_case import AsyncIterations, Conveyor
from graph_case import BLOCK_SIZE, CAPACITY, NUM_BLOCKS, TOKENS, prompts, sequence
from imitated_streams import Hook, ImitatedBackend, StallingBackend
from pipeline_case import RandomIterations, check_random_plans, check_result, make_storage, tiny_model
from seeds import seeds
from workers import running_worker, with_workers

from neo_desktop.engine.batch import IterationPlan, ScheduledSequence, SubBatch
from neo_desktop.engine.execute.lane import Lane
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.execute.timeline import Stage, Timeline
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.kv.device_layer import DeviceLayer
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.remote.link import WorkerLostError
from neo_desktop.engine.remote.worker import AttentionWorker
from neo_desktop.engine.watchdog import DEFAULT_TIMEOUT, Timeout
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import Dense
from neo_desktop.models.stages import Stages

pytestmark = pytest.mark.usefixtures("kernels")

ONE, TWO = KVTier.worker(1), KVTier.worker(2)
# Request -> its tier, its blocks, and its number of tokens before the first decode.
HOMES = {
    "a": (KVTier.DEVICE, (0, 5), 20),
    "b": (KVTier.HOST, (8, 1), 16),
    "c": (ONE, (0, 7), 25),
    "d": (TWO, (3,), 1),
    "e": (ONE, (4, 6), 9),
}


@pytest.fixture(scope="module")
def model() -> Decoder:
    """A model of two layers, one with a sliding window."""
    return tiny_model((None, 5), form=Dense(uses_tiles=False))


class Case:
    """An executor with an imitated GPU, and two workers in threads."""

    def __init__(
        self,
        stack: ExitStack,
        model: Decoder,
        seed: int = 0,
        hook: Hook | None = None,
        num_queues: int | None = None,
        backend: ImitatedBackend | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> None:
        started = [stack.enter_context(running_worker()) for _ in range(2)]
        self.workers: list[AttentionWorker] = [worker for worker, _ in started]
        here = make_storage(
            model, dict.fromkeys(MEASURED_TIERS, NUM_BLOCKS), BLOCK_SIZE, device_kind=DeviceLayer
        )
        pools = {tier: here[tier] for tier in here.tiers}
        addresses = [address for _, address in started]
        self.storage = KVStorage(with_workers(model, pools, addresses, NUM_BLOCKS, BLOCK_SIZE))
        self.backend = backend or ImitatedBackend(seed, hook, num_queues)
        self.timeline = Timeline()
        self.executor = ModelRunner(
            Stages(model, dispatch),
            self.storage,
            CAPACITY,
            self.backend,
            num_programs=8,
            uses_gpu=True,
            timeline=self.timeline,
            timeout=timeout,
        )
        stack.callback(self.executor.close)

    def check(self, model: Decoder, plan: IterationPlan) -> None:
        contexts = {s.request_id: TOKENS[s.request_id][: s.context_len] for s in plan.sequences}
        check_result(model, plan, contexts, self.executor.execute(plan))


def plan_of(step: int | None, *parts: str) -> IterationPlan:
    """Return the prompts, or the decodes after them, in sub-batches of these names."""

    def batch(names: str) -> SubBatch:
        found = []
        for name in sorted(names):
            tier, blocks, start = HOMES[name]
            begin, end = (0, start) if step is None else (start + step, start + step + 1)
            made = sequence(name, begin, end)
            found.append(made._replace(tier=tier, block_table=IntArray(blocks).view()))
        return SubBatch(tuple(found))

    return IterationPlan(tuple(batch(names) for names in parts))


@pytest.mark.sample(4)
@pytest.mark.parametrize("parts", [("abcde",), ("acd", "be"), ("c", "d"), ("cde",)])
@pytest.mark.parametrize("num_queues", [None, 1, 2, 8])
def test_decodes_of_workers_are_one_graph(
    stack: ExitStack, model: Decoder, num_queues: int | None, parts: tuple[str, ...]
) -> None:
    """The only other launches are the inputs before the graph, and the sampling after it."""
    case = Case(stack, model, num_queues or 0, num_queues=num_queues)
    case.check(model, plan_of(None, "abcde"))
    for step in range(4):
        case.check(model, plan_of(step, *parts))
        case.backend.check_flags()
        assert case.backend.num_graphs_launched == (step > 0)
    assert case.backend.num_programs == 1
    assert case.backend.num_launched == 2


def test_prompts_of_workers_leave_the_layers_graphs(stack: ExitStack, model: Decoder) -> None:
    case = Case(stack, model)
    case.check(model, plan_of(None, "abcd"))
    for step in range(3):
        decodes, prompt = plan_of(step, "abcd").sub_batches[0], plan_of(None, "e").sub_batches[0]
        case.check(model, IterationPlan((SubBatch((*decodes.sequences, *prompt.sequences)),)))
    assert case.backend.num_graphs_launched == 3  # of two layers


@pytest.mark.parametrize("seed", seeds(2, 6))
def test_random_plans_give_the_tokens_of_a_plain_computation(
    stack: ExitStack, model: Decoder, seed: int
) -> None:
    case = Case(stack, model, seed, num_queues=seed or None)
    iterations = RandomIterations(seed, NUM_BLOCKS, tiers=case.storage.tiers, block_size=BLOCK_SIZE)
    check_random_plans(case.executor.execute, model, iterations, 8, after=case.backend.check_flags)


@pytest.mark.parametrize("seed", seeds(2, 4))
def test_random_paces_on_streams_of_any_order(stack: ExitStack, model: Decoder, seed: int) -> None:
    case = Case(stack, model, seed, num_queues=(None, 1, 2, 3)[seed])
    tiers, num_layers = case.storage.tiers, model.config.num_layers
    iterations = AsyncIterations(seed, NUM_BLOCKS, BLOCK_SIZE, num_layers, tiers=tiers)
    check_random_plans(case.executor.execute, model, iterations, 12, after=case.backend.check_flags)
    assert iterations.num_ended > 0


def at_workers(plan: IterationPlan) -> IterationPlan:
    """Return a plan of `graph_case` with c and d on workers."""

    def moved(each: ScheduledSequence) -> ScheduledSequence:
        return each._replace(tier={"c": ONE, "d": TWO}.get(each.request_id, each.tier))

    batches = tuple(SubBatch(tuple(map(moved, batch.sequences))) for batch in plan.sub_batches)
    async_decodes = tuple(tuple(each and moved(each) for each in group) for group in plan.async_decodes)
    return replace(plan, sub_batches=batches, async_decodes=async_decodes)


@pytest.mark.parametrize("beside", [("ab",), ("",), ("a", "b")])
def test_turns_of_workers_and_the_cpu_are_graphs(
    stack: ExitStack, model: Decoder, beside: tuple[str, ...]
) -> None:
    """Both alternating async steps are one graph each, for any assignment of rows to slots."""
    case = Case(stack, model, num_queues=2)
    case.executor.execute(at_workers(prompts("abcde")))
    for turn, (plan, contexts) in enumerate(Conveyor(model.config.num_layers, "cde", beside).turns(9)):
        check_result(model, plan, contexts, case.executor.execute(at_workers(plan)))
        assert case.backend.num_graphs_launched == (turn > 1)
        case.backend.check_flags()
    assert case.backend.num_programs == 2


@pytest.mark.parametrize("layer", [0, 1])
def test_after_a_worker_was_lost_in_a_turn_the_others_begin_their_tokens_again(
    stack: ExitStack, model: Decoder, layer: int
) -> None:
    is_losing = False

    def hook(lane: Lane, stage: Stage) -> None:
        if is_losing and lane is Lane.TO_HOST and stage.layer == layer:
            case.workers[1].close()

    case, line = Case(stack, model, hook=hook), Conveyor(model.config.num_layers, "cde")
    case.executor.execute(at_workers(prompts("abcde")))
    for plan, contexts in line.turns(5):
        check_result(model, plan, contexts, case.executor.execute(at_workers(plan)))
    is_losing = True
    ((plan, _),) = line.turns(1)
    with pytest.raises(WorkerLostError, match="worker-2 is lost"):
        case.executor.execute(at_workers(plan))
    is_losing = False
    num_turns, steps = line.num_turns, line.steps
    steps[line.line[-1] or ""] -= 1  # its token did not arrive
    rest = Conveyor(model.config.num_layers, "ce", num_turns=num_turns - 1, steps=steps)
    for plan, contexts in rest.turns(6):
        check_result(model, plan, contexts, case.executor.execute(at_workers(plan)))
    assert fallbacks.level("graphs") == "host-flags"


@pytest.mark.parametrize("layer", [0, 1])
def test_a_worker_that_is_lost_within_a_graph_ends_the_iteration_and_the_graph_serves_again(
    stack: ExitStack, model: Decoder, layer: int
) -> None:
    """The GPU's flags are raised, and the iteration runs again without the lost worker's decodes."""
    is_losing = False

    def hook(lane: Lane, stage: Stage) -> None:
        if is_losing and lane is Lane.TO_HOST and stage.layer == layer:
            case.workers[1].close()

    case = Case(stack, model, hook=hook)
    case.check(model, plan_of(None, "abcde"))
    for step in range(2):
        case.check(model, plan_of(step, "abcde"))
    is_losing = True
    with pytest.raises(WorkerLostError, match="worker-2 is lost") as caught:
        case.executor.execute(plan_of(2, "abcde"))
    assert caught.value.worker == "worker-2"
    assert case.backend.num_graphs_launched == 1
    is_losing = False
    for step in (2, 3):
        case.check(model, plan_of(step, "abce"))
    assert case.backend.num_graphs_launched == 1
    assert fallbacks.level("graphs") == "host-flags"


def test_where_streams_have_no_flags_threads_talk_to_workers(stack: ExitStack, model: Decoder) -> None:
    fallbacks.limit("graphs", "device-only", "a test")
    case = Case(stack, model)
    case.check(model, plan_of(None, "abcde"))
    for step in range(2):
        case.check(model, plan_of(step, "acd", "be"))
        assert case.backend.num_graphs_launched == 0


def test_a_gpu_that_never_hands_over_is_done_without_from_then_on(
    stack: ExitStack, model: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    backend = StallingBackend()
    case = Case(stack, model, backend=backend, timeout=Timeout(1.0, 0.0))
    case.check(model, plan_of(None, "ac"))
    backend.is_stalling = True
    for step in range(2):
        case.check(model, plan_of(step, "ac"))
        assert not backend.was_graph
    assert 'the GPU did not come to "worker\'s attention" in layer 1' in caplog.text
    assert fallbacks.level("graphs") == "device-only"


def test_an_executor_may_be_closed_while_a_worker_is_asked(stack: ExitStack, model: Decoder) -> None:
    def hook(lane: Lane, stage: Stage) -> None:
        if lane is Lane.TO_HOST and stage.layer == 1 and is_closing:
            case.executor.close()

    is_closing = False
    case = Case(stack, model, hook=hook)
    case.check(model, plan_of(None, "acde"))
    is_closing = True
    with pytest.raises(RuntimeError, match="closed in the middle"):
        case.executor.execute(plan_of(0, "acde"))
