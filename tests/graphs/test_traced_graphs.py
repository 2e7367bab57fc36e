"""Traced stages in graphs: on imitated streams, and on a GPU."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from async_case import AsyncIterations, Conveyor
from graph_case import BLOCK_SIZE, HOMES, NUM_BLOCKS, make_executor, prompts, sequence
from imitated_streams import ImitatedBackend
from pipeline_case import FewPrompts, RandomIterations, check_random_plans, check_result, make_storage
from recurrent_models import SEVERAL_ATTENTIONS
from seeds import first
from traced_models import FAMILIES, save

from neo_desktop.engine.batch import IterationPlan, ScheduledSequence, StateSlots, SubBatch
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.execute.build import build_executor
from neo_desktop.engine.execute.lane import Lane
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import Dense
from neo_desktop.models.registry import load_model, stages_of
from neo_desktop.models.traced.config import read_traced

KNOWN = FAMILIES | SEVERAL_ATTENTIONS  # the recurrent models of all tests, which a process exports once
PLAIN = Dense(uses_tiles=False)


@pytest.fixture(
    scope="module",
    params=[
        "llama",
        "gemma3",
        "gpt-neox",
        "stablelm-parallel",
        "olmoe",
        "glm4-moe-lite",
        "qwen3.5",
        "falcon-h1",
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(request.param), *KNOWN.get(request.param, (request.param, {})))


def model_in(folder: Path, device: str) -> Decoder:
    config = read_traced(folder)
    of = {"dtype": torch.float32, "device": torch.device(device), "form": PLAIN}
    model = load_model(open_checkpoint(folder), config, **of)
    if device == "cpu":
        stages_of(model, None)  # uses torch's operators, even if a GPU's are requested later
    return model


@pytest.mark.sample(1)
@pytest.mark.usefixtures("kernels")
def test_random_plans_in_graphs_on_streams_of_any_order(folder: Path) -> None:
    model, backend = model_in(folder, "cpu"), ImitatedBackend(1, num_queues=2)
    executor, _ = make_executor(model, backend=backend)
    kind = FewPrompts if model.config.state_shapes else RandomIterations
    iterations, graphs = kind(1, block_size=BLOCK_SIZE), 0
    for plan, context in iterations.plans(16):
        result = executor.execute(plan)
        check_result(model, plan, context, result)
        backend.check_flags()
        graphs += backend.was_graph
        iterations.take_in(result)
    assert graphs
    executor.close()


def step(position: int, states: Sequence[int], tokens: int = 1) -> IterationPlan:
    """Return a plan with the next token of a request and its draft, or with its prompt.

    Args:
        states: slots before the token, after it, and after each token of the draft.
    """
    first = sequence("a", position, position + tokens)._replace(states=StateSlots(states[0], states[1]))
    rows = [first]
    for row, (source, target) in enumerate(pairwise(states[1:]), position + 1):
        draft = sequence("a", row, row + 1)
        rows.append(draft._replace(states=StateSlots(source, target), is_draft=True))
    return IterationPlan((SubBatch(tuple(rows)),))


@pytest.mark.parametrize("family", first(["qwen3.5", "falcon-h1"]))
@pytest.mark.usefixtures("kernels")
def test_drafts_between_graphs_give_the_tokens_of_single_decodes(tmp_path: Path, family: str) -> None:
    """Graphs of decodes do not have the spans of drafts, and serve again after an iteration with a draft."""
    model = model_in(save(tmp_path, *SEVERAL_ATTENTIONS[family]), "cpu")
    backend = ImitatedBackend(1, num_queues=2)
    with_graphs, _ = make_executor(model, backend=backend, tiers=(KVTier.DEVICE,))
    plain, _ = make_executor(model, tiers=(KVTier.DEVICE,))
    first = 20
    for executor in (with_graphs, plain):
        executor.execute(step(0, (-1, 0), first))
    chosen = []
    for index in range(9):
        result = plain.execute(step(first + index, (index % 2, (index + 1) % 2)))
        chosen.append(result.sampled["a"].token_id)
    found, graphs = [], []
    for start, width, slots in ((0, 0, (0, 1)), (1, 0, (1, 2)), (2, 3, (2, 3, 4, 5, 6)), (6, 0, (6, 7))):
        result = with_graphs.execute(step(first + start, slots))
        found.append(result.sampled["a"].token_id)
        found += [token.token_id for token in result.after_drafts.get("a", ())]
        assert len(found) == start + width + 1
        graphs.append(backend.was_graph)
    assert found == chosen[: len(found)]
    assert graphs == [False, True, False, True]
    with_graphs.close()
    plain.close()


class FewAsync(FewPrompts, AsyncIterations):
    """Requests arrive together, and some decodes are async."""


@pytest.mark.parametrize("family", first(SEVERAL_ATTENTIONS))
@pytest.mark.usefixtures("kernels")
def test_async_decodes_of_recurrent_models_at_random_paces(tmp_path: Path, family: str) -> None:
    model = model_in(save(tmp_path, *SEVERAL_ATTENTIONS[family]), "cpu")
    backend = ImitatedBackend(3, num_queues=2)
    executor, _ = make_executor(model, backend=backend)
    iterations = FewAsync(3, NUM_BLOCKS, BLOCK_SIZE, model.config.num_layers)
    check_random_plans(executor.execute, model, iterations, 24, after=backend.check_flags)
    assert iterations.num_ended > 3
    executor.close()


def with_states(plan: IterationPlan) -> IterationPlan:
    """Give each sequence two slots in turn, as a function of its position."""

    def one(each: ScheduledSequence) -> ScheduledSequence:
        first, step = 2 * list(HOMES).index(each.request_id), each.start - HOMES[each.request_id][2]
        slots = StateSlots(first + step % 2, first + (step + 1) % 2) if each.start else StateSlots(-1, first)
        return each._replace(states=slots)

    return replace(
        plan,
        sub_batches=tuple(SubBatch(tuple(map(one, each.sequences))) for each in plan.sub_batches),
        async_decodes=tuple(
            tuple(None if each is None else one(each) for each in group) for group in plan.async_decodes
        ),
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", first(SEVERAL_ATTENTIONS))
@pytest.mark.parametrize("lane", [None, Lane.DEVICE, Lane.TO_DEVICE])
@pytest.mark.usefixtures("kernels")
def test_async_steps_of_recurrent_models_are_graphs_and_can_be_repeated(
    tmp_path: Path, family: str, lane: Lane | None
) -> None:
    """Args: lane: Where some async steps fail."""
    model, is_failing = model_in(save(tmp_path, *SEVERAL_ATTENTIONS[family]), "cpu"), False

    def hook(at: Lane, stage: Stage) -> None:
        if is_failing and at == lane and stage.layer == 1:
            raise ValueError("broken")

    executor, backend = make_executor(model, hook=None if lane is None else hook)
    executor.execute(with_states(prompts("abcdeg")))
    for turn, (plan, context) in enumerate(Conveyor(model.config.num_layers, beside=("ab", "g")).turns(10)):
        is_failing = lane is not None and turn in (4, 7)
        if is_failing:
            with pytest.raises(ValueError, match="broken"):
                executor.execute(with_states(plan))
        is_failing = False
        check_result(model, plan, context, executor.execute(with_states(plan)))
        assert lane is not None or backend.was_graph == (turn > 1)
    executor.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_graphs_give_the_tokens_of_the_code(folder: Path) -> None:
    """Graphs share the memory of intermediate results: each graph must find its own results on replay."""
    model, on_cpu = model_in(folder, "cuda"), model_in(folder, "cpu")
    storage = make_storage(model, dict.fromkeys(MEASURED_TIERS, 24), BLOCK_SIZE)
    executor = build_executor(model, storage, 256, 8, None, Streams(model.device))
    kind = FewPrompts if model.config.state_shapes else RandomIterations
    iterations = kind(1, block_size=BLOCK_SIZE)
    check_random_plans(executor.execute, on_cpu, iterations, 16, tolerance=2e-3)
    assert executor._backend.has_graphs
    executor.close()
