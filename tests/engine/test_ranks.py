"""Ranks execute rank 0's plans and give the tokens of a whole model, with short messages."""

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from async_case import AsyncIterations
from executors import thread_executor
from expert_models import expert_model
from hypothesis import given
from hypothesis import strategies as st
from pipeline_case import RandomIterations, check_random_plans, make_storage, sampling_input, tiny_model
from seeds import seeds
from thread_ranks import ThreadSums, parts_of

from neo_desktop.engine.batch import IterationPlan, IterationResult, ScheduledSequence, SubBatch
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.execute.ranks import plans
from neo_desktop.engine.execute.ranks.plans import PlanReader, PlanWriter
from neo_desktop.engine.int_array import IntArray
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
        self._writer, self._readers = PlanWriter(), [PlanReader() for _ in range(count - 1)]

    def execute(self, plan: IterationPlan) -> IterationResult:
        told = pickle.dumps(self._writer.told(plan))
        theirs = [reader.plan(pickle.loads(told)) for reader in self._readers]
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


def sequence(name: str, tier: KVTier, blocks: list[int], start: int) -> ScheduledSequence:
    table = IntArray(blocks).view()
    return ScheduledSequence(name, (start % 7,), start, tier, table, sampling_input(start))


Told = st.tuples(
    st.sampled_from("abcde"),
    st.sampled_from((KVTier.DEVICE, KVTier.HOST)),
    st.lists(st.integers(0, 3), max_size=4),
    st.integers(0, 99),
)


@given(st.lists(st.lists(Told, max_size=5, unique_by=lambda each: each[0]), max_size=12), st.integers(1, 6))
def test_plans_arrive_as_they_were(
    iterations: list[list[tuple[str, KVTier, list[int], int]]], most: int
) -> None:
    """Block tables grow, end, restart in another tier, or drop out of the cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "MAX_TABLES", most)
        writer, reader = PlanWriter(), PlanReader()
        for told in iterations:
            plan = IterationPlan((SubBatch(tuple(sequence(*each) for each in told)),))
            arrived = reader.plan(pickle.loads(pickle.dumps(writer.told(plan))))
            for ours, theirs in zip(plan.sequences, arrived.sequences, strict=True):
                assert ours[:4] == theirs[:4]
                assert np.array_equal(ours.block_table, theirs.block_table)


def test_of_a_long_context_only_the_new_block_is_told() -> None:
    writer = PlanWriter()
    first, second = (
        len(pickle.dumps(writer.told(IterationPlan((SubBatch((each,)),)))))
        for each in grown("a request", blocks=5000)
    )
    assert first > 20_000
    assert second < 1000


def grown(name: str, blocks: int) -> Iterator[ScheduledSequence]:
    for count in (blocks, blocks + 1):
        yield sequence(name, KVTier.HOST, list(range(count)), 16 * count - 1)
