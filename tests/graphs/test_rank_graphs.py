"""Iterations of a tensor-parallel model as graphs between all-reduces; tokens do not depend on the graphs."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
from graph_case import BLOCK_SIZE, CAPACITY, NUM_BLOCKS, contexts, decodes, prompts
from imitated_streams import ImitatedBackend
from pipeline_case import RandomIterations, check_random_plans, check_result, make_storage, tiny_model
from seeds import seeds
from thread_ranks import ThreadSums, parts_of

from neo_desktop.engine.batch import IterationPlan, IterationResult
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.execute.ranks.driver import for_other_ranks
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.kv.device_layer import DeviceLayer
from neo_desktop.engine.kv_tier import MEASURED_TIERS
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import Dense
from neo_desktop.models.registry import stages_of

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(scope="module")
def model() -> Decoder:
    """A model of two layers, one with a sliding window."""
    return tiny_model((None, 5), form=Dense(uses_tiles=False))


class TwoRanks:
    """Executors of both ranks, each with an imitated GPU; rank 0's plans reach the other rank as bytes."""

    def __init__(
        self,
        model: Decoder,
        seed: int = 0,
        num_queues: int | None = None,
    ) -> None:
        sums = ThreadSums(2)
        self._threads = ThreadPoolExecutor(2)
        self.backends = [ImitatedBackend(seed + number, num_queues=num_queues) for number in range(2)]
        self.executors = []
        for number, (part, backend) in enumerate(zip(parts_of(model, 2), self.backends, strict=True)):
            storage = make_storage(
                part, dict.fromkeys(MEASURED_TIERS, NUM_BLOCKS), BLOCK_SIZE, device_kind=DeviceLayer
            )
            stages = stages_of(part, dispatch, sums.of(number), has_head=number == 0)
            self.executors.append(
                ModelRunner(stages, storage, CAPACITY, backend, num_programs=8, uses_gpu=True)
            )

    def execute(self, plan: IterationPlan) -> IterationResult:
        theirs = pickle.loads(pickle.dumps(for_other_ranks(plan)))
        ours, others = self._threads.map(ModelRunner.execute, self.executors, [plan, theirs])
        assert not any((others.sampled, others.failed, others.pooled))
        return ours

    def close(self) -> None:
        for executor in self.executors:
            executor.close()
        self._threads.shutdown()


@pytest.mark.sample(3)
@pytest.mark.parametrize("parts", [("abf",), ("ac", "de"), ("abcdef",)])
@pytest.mark.parametrize("num_queues", [None, 1, 3])
def test_between_sums_all_is_graphs(model: Decoder, num_queues: int | None, parts: tuple[str, ...]) -> None:
    """The other launches are two all-reduces per layer and sub-batch, the inputs and the sampling."""
    ranks = TwoRanks(model, num_queues or 0, num_queues)
    ranks.execute(prompts("abcdef"))
    for step in range(4):
        plan = decodes(*parts, step=step)
        check_result(model, plan, contexts(plan), ranks.execute(plan))
    num_sums = 2 * model.config.num_layers * len(parts)
    for backend, num_others in zip(ranks.backends, (2, 1), strict=True):
        assert backend.num_graphs_launched == num_sums + 1
        assert backend.num_launched == num_sums + num_others
        assert backend.num_programs == 1
    ranks.close()


@pytest.mark.parametrize("seed", seeds(2, 4))
def test_random_plans_give_the_tokens_of_the_whole(model: Decoder, seed: int) -> None:
    ranks = TwoRanks(model, seed, num_queues=seed or None)
    iterations = RandomIterations(seed, NUM_BLOCKS, block_size=BLOCK_SIZE)
    check_random_plans(ranks.execute, model, iterations, 8)
    ranks.close()


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_without_graphs_adds_up_the_same_rows(
    model: Decoder, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank rounds sizes up, so that all-reduces have the same shape."""
    ranks = TwoRanks(model)
    monkeypatch.setattr(ranks.executors[number], "_has_graphs", False)
    ranks.execute(prompts("abcdef"))
    for step in range(3):
        plan = decodes("abcde", step=step)
        check_result(model, plan, contexts(plan), ranks.execute(plan))
    assert ranks.backends[number].num_graphs_launched == 0
    assert ranks.backends[1 - number].num_graphs_launched > 0
    ranks.close()
