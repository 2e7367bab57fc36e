"""Iterations of a divided model as graphs between its sums: the same tokens, whichever ranks have graphs."""

import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
import torch
from graph_case import BLOCK_SIZE, CAPACITY, NUM_BLOCKS, contexts, decodes, prompts
from imitated_streams import ImitatedBackend
from pipeline_case import RandomIterations, check_random_plans, check_result, make_storage, tiny_model
from thread_ranks import ThreadSums, parts_of
from traced_models import FAMILIES, save

from neo_desktop.engine.batch import IterationPlan, IterationResult
from neo_desktop.engine.cuda.streams import WholeDevice
from neo_desktop.engine.execute.build import build_executor
from neo_desktop.engine.execute.plan_executor import PlanExecutor
from neo_desktop.engine.execute.ranks.group import Group
from neo_desktop.engine.execute.ranks.plans import PlanReader, PlanWriter
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.kv.device_layer import DeviceLayer
from neo_desktop.engine.placement import PLACES
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import Dense
from neo_desktop.models.rank import Rank
from neo_desktop.models.registry import load_model, stages_of
from neo_desktop.models.traced.config import read_traced
from neo_desktop.models.traced.decoder import TracedDecoder
from neo_desktop.models.traced.stages import TracedStages

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(scope="module")
def model() -> Decoder:
    """Two layers, one with a window."""
    return tiny_model((None, 5), form=Dense(uses_tiles=False))


@pytest.fixture(scope="module", params=["phi3", "olmoe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model by the code of transformers."""
    model_type, changes = FAMILIES[request.param]
    return save(tmp_path_factory.mktemp(request.param), model_type, changes | {"intermediate_size": 256})


def part_of(folder: Path, rank: Rank, device: str = "cpu") -> TracedDecoder:
    of = {"dtype": torch.float32, "device": torch.device(device), "form": Dense(uses_tiles=False)}
    part = load_model(open_checkpoint(folder), read_traced(folder), rank=rank, **of)
    assert isinstance(part, TracedDecoder)
    return part


@pytest.fixture(scope="module")
def traced(folder: Path) -> list[Decoder]:
    """The model, and its parts."""
    return [part_of(folder, rank) for rank in (Rank(), Rank(0, 2), Rank(1, 2))]


class TwoRanks:
    """Executors of both ranks, each with an imitated GPU; what rank 0 plans reaches the other as bytes."""

    def __init__(
        self,
        model: Decoder,
        seed: int = 0,
        num_queues: int | None = None,
        parts: Sequence[Decoder] | None = None,
    ) -> None:
        sums = ThreadSums(2)
        self._threads = ThreadPoolExecutor(2)
        self._writer, self._reader = PlanWriter(), PlanReader()
        self.backends = [ImitatedBackend(seed + number, num_queues=num_queues) for number in range(2)]
        self.executors = []
        parts = parts_of(model, 2) if parts is None else parts
        for number, (part, backend) in enumerate(zip(parts, self.backends, strict=True)):
            storage = make_storage(
                part, dict.fromkeys(PLACES, NUM_BLOCKS), BLOCK_SIZE, device_kind=DeviceLayer
            )
            operators = None if isinstance(part, TracedDecoder) else dispatch
            stages = stages_of(part, operators, sums.of(number), has_head=number == 0)
            self.executors.append(
                PlanExecutor(stages, storage, CAPACITY, backend, num_programs=8, uses_gpu=True)
            )

    def execute(self, plan: IterationPlan) -> IterationResult:
        theirs = self._reader.plan(pickle.loads(pickle.dumps(self._writer.told(plan))))
        ours, others = self._threads.map(PlanExecutor.execute, self.executors, [plan, theirs])
        assert not any((others.sampled, others.failed, others.pooled))
        return ours

    def close(self) -> None:
        for executor in self.executors:
            executor.close()
        self._threads.shutdown()


@pytest.mark.parametrize("parts", [("abf",), ("ac", "de"), ("abcdef",)])
@pytest.mark.parametrize("num_queues", [None, 1, 3])
def test_between_sums_all_is_graphs(model: Decoder, num_queues: int | None, parts: tuple[str, ...]) -> None:
    """What is launched besides are two sums per layer and sub-batch, the inputs and the sampling."""
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


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_give_the_tokens_of_the_whole(model: Decoder, seed: int) -> None:
    ranks = TwoRanks(model, seed, num_queues=seed or None)
    iterations = RandomIterations(seed, NUM_BLOCKS, block_size=BLOCK_SIZE)
    check_random_plans(ranks.execute, model, iterations, 8)
    ranks.close()


@pytest.mark.sample(0)
def test_between_sums_the_code_of_transformers_is_graphs(traced: list[Decoder]) -> None:
    """Of experts one sum per layer, too."""
    whole, *parts = traced
    ranks = TwoRanks(whole, 1, 2, parts)
    ranks.execute(prompts("abcdef"))
    for step in range(4):
        plan = decodes("ac", "de", step=step)
        check_result(whole, plan, contexts(plan), ranks.execute(plan))
    for backend in ranks.backends:
        assert backend.num_graphs_launched == 2 * whole.config.num_layers * 2 + 1
    ranks.close()


def test_random_plans_of_the_code_of_transformers(traced: list[Decoder]) -> None:
    whole, *parts = traced
    ranks = TwoRanks(whole, 3, 3, parts)
    iterations = RandomIterations(3, NUM_BLOCKS, block_size=BLOCK_SIZE)
    check_random_plans(ranks.execute, whole, iterations, 8)
    ranks.close()


class Halves:
    """Stands for a group: a sum is half of what this rank gives."""

    rank = Rank(0, 2)

    def sum(self, part: torch.Tensor) -> None:
        part.mul_(0.5)

    def sum_on_host(self, part: torch.Tensor) -> None:
        raise AssertionError("nothing is lost here")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_values_last_from_graph_to_graph(folder: Path) -> None:
    """What the code computes before a sum and reads behind it lies in memory that graphs share."""
    group = Halves()
    on_cpu, model = (part_of(folder, group.rank, device) for device in ("cpu", "cuda"))
    on_cpu.stages[None] = TracedStages(on_cpu, None, group.sum)
    storage = make_storage(model, dict.fromkeys(PLACES, 24), BLOCK_SIZE)
    of_device = WholeDevice(model.device)
    executor = build_executor(model, storage, 256, 8, None, of_device, cast("Group", group))
    iterations = RandomIterations(1, block_size=BLOCK_SIZE)
    check_random_plans(executor.execute, on_cpu, iterations, 16, tolerance=2e-3)
    assert executor._backend.has_graphs
    executor.close()


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_without_graphs_adds_up_the_same_rows(
    model: Decoder, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are rounded up everywhere, so that sums have the same shape."""
    ranks = TwoRanks(model)
    monkeypatch.setattr(ranks.executors[number], "_has_graphs", False)
    ranks.execute(prompts("abcdef"))
    for step in range(3):
        plan = decodes("abcde", step=step)
        check_result(model, plan, contexts(plan), ranks.execute(plan))
    assert ranks.backends[number].num_graphs_launched == 0
    assert ranks.backends[1 - number].num_graphs_launched > 0
    ranks.close()
