"""Images beside graphs: iterations with rows of images run without graphs, and compute the same."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from graph_case import BLOCK_SIZE, make_executor
from imitated_streams import ImitatedBackend
from pipeline_case import RandomIterations, make_storage
from vision_models import save

from neo_desktop.engine.batch import IterationPlan, SubBatch
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.execute.build import build_executor
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.linear.dense import Dense
from neo_desktop.models.registry import load_model, stages_of
from neo_desktop.models.traced.config import read_traced
from neo_desktop.models.vision.prompt import ImageRows, Sight

POSITIONS = np.arange(2, 6)


def with_images(plan: IterationPlan, hidden_size: int) -> IterationPlan:
    """Return the plan with rows of images at some positions of every request."""
    embeddings = np.random.default_rng(0).standard_normal((len(POSITIONS), hidden_size), np.float32)
    no_axes = (), np.empty(0, np.int64), np.empty((0, len(POSITIONS)), np.int64)
    images = ImageRows(POSITIONS, embeddings, ((2, b"image"),), Sight.CAUSAL, (), *no_axes)
    return replace(
        plan,
        sub_batches=tuple(
            SubBatch(tuple(sequence._replace(images=images) for sequence in batch.sequences))
            for batch in plan.sub_batches
        ),
    )


class FewPrompts(RandomIterations):
    """Requests arrive together: later iterations have no images."""

    def _join(self) -> None:
        if not self._requests:
            super()._join()


def reads_images(plan: IterationPlan) -> bool:
    """Return True if the plan has rows of images."""
    spans = (s.images.within(s.start, s.context_len) for s in plan.sequences if s.images is not None)
    return any(span.stop > span.start for span in spans)


@pytest.mark.usefixtures("kernels")
def test_iterations_with_and_without_images_give_the_tokens_of_the_code(tmp_path: Path) -> None:
    folder, cpu = save(tmp_path, "mistral3"), torch.device("cpu")
    form = Dense(uses_tiles=False)
    model = load_model(
        open_checkpoint(folder), read_traced(folder), dtype=torch.float32, device=cpu, form=form
    )
    stages_of(model, None)  # uses torch's operators, even if a GPU's are requested later
    backend = ImitatedBackend(1, num_queues=2)
    with_graphs, _ = make_executor(model, backend=backend)
    tiers = (KVTier.DEVICE,)
    plain = build_executor(
        model, make_storage(model, dict.fromkeys(tiers, 24), BLOCK_SIZE), 256, 8, None, Streams(cpu)
    )
    iterations, graphs, images = FewPrompts(2, tiers=tiers, block_size=BLOCK_SIZE), 0, 0
    for plan, _ in iterations.plans(24):
        changed = with_images(plan, model.config.hidden_size)
        result, expected = with_graphs.execute(changed), plain.execute(changed)
        assert {name: token.token_id for name, token in result.sampled.items()} == {
            name: token.token_id for name, token in expected.sampled.items()
        }
        assert not (reads_images(changed) and backend.was_graph)
        graphs, images = graphs + backend.was_graph, images + reads_images(changed)
        iterations.take_in(result)
    assert graphs
    assert images
    with_graphs.close()
    plain.close()
