"""Ranks execute rank 0's plans and give the tokens of a whole model, with short messages."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
from async_case import AsyncIterations
from executors import thread_executor
from expert_models import expert_model
from pipeline_case import RandomIterations, check_random_plans, make_storage, tiny_model
from seeds import seeds
from thread_ranks import ThreadSums, parts_of

from neo_desktop.engine.batch import IterationPlan, IterationResult
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.execute.ranks.driver import for_other_ranks
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.stages import Stages

NUM_BLOCKS = 24
ALL = (KVTier.DEVICE, KVTier.STREAMED, KVTier.HOST)


class ThreadRanks:
    """One executor per rank; rank 0's plans reach the others as bytes."""

    def __init__(self, model: Decoder, count: int, tiers: tuple[KVTier, ...]) -> None:
        sums = ThreadSums(count)
        self._threads = ThreadPoolExecutor(count)
        self._executors: list[ModelRunner] = []
        for number, part in enumerate(parts_of(model, count)):
            stages = Stages(part, reduce=sums.of(number), has_head=number == 0)
            storage = make_storage(part, dict.fromkeys(tiers, NUM_BLOCKS))
            self._executors.append(thread_executor(part, storage, stages=stages))

    def execute(self, plan: IterationPlan) -> IterationResult:
        told = pickle.dumps(for_other_ranks(plan))
        theirs = [pickle.loads(told) for _ in self._executors[1:]]
        first, *others = self._threads.map(ModelRunner.execute, self._executors, [plan, *theirs])
        assert not any(each.sampled or each.failed or each.pooled for each in others)
        return first

    def close(self) -> None:
        for executor in self._executors:
            executor.close()
        self._threads.shutdown()


def check_iterations(model: Decoder, iterations: RandomIterations, ranks: ThreadRanks, count: int) -> None:
    check_random_plans(ranks.execute, model, iterations, count)
    ranks.close()


@pytest.mark.parametrize("seed", seeds(2, 3))
def test_divided_models_give_the_tokens_of_the_whole(seed: int) -> None:
    """Plans mix chunked prompts, decodes and moves between all tiers, in one or two sub-batches."""
    model = tiny_model()
    check_iterations(model, RandomIterations(seed, NUM_BLOCKS, ALL), ThreadRanks(model, 2, ALL), 12)


def test_experts_are_divided() -> None:
    model, tiers = expert_model(intermediate_size=128), (KVTier.DEVICE, KVTier.HOST)
    check_iterations(model, RandomIterations(1, NUM_BLOCKS), ThreadRanks(model, 2, tiers), 12)


@pytest.mark.parametrize("seed", range(2))
def test_staggered_decodes_are_divided(seed: int) -> None:
    model, tiers = tiny_model(), (KVTier.DEVICE, KVTier.HOST)
    check_iterations(model, AsyncIterations(seed), ThreadRanks(model, 2, tiers), 30)
