"""Python launches almost nothing on a GPU in an iteration, except for prompt attention."""

from collections import Counter

import pytest
import torch
from graph_case import GREEDY, HOMES, decodes, prompts, sequence
from imitated_device import ImitatedDevice, needs_imitated_gpu
from pipeline_case import make_storage, tiny_config

from neo_desktop.engine.batch import BlockCopy, IterationPlan, SubBatch
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.execute.build import build_executor
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.registry import random_model
from neo_desktop.models.weights import named_weights

pytestmark = needs_imitated_gpu

BLOCK_SIZE = 16
FEW, MANY = 2, 5  # numbers of layers; the difference shows the cost per layer
# Operations without computation or copies: they order streams, and signal the CPU.
SIGNALS = ("record", "wait event", "write value", "wait value")


def _mixed(new: str, start: int = 0) -> IterationPlan:
    """Return decodes of both tiers in two sub-batches, and chunks of these prompts from `start` on."""
    first, second = (part.sequences for part in decodes("abc", "e", sampling=GREEDY).sub_batches)
    chunks = [sequence(name, start, HOMES[name][2], GREEDY) for name in new]
    ordered = [
        one
        for tier in MEASURED_TIERS
        for one in (*(s for s in chunks if s.tier == tier), *(s for s in first if s.tier == tier))
    ]
    return IterationPlan((SubBatch(tuple(ordered)), SubBatch(second)))


def _moving() -> IterationPlan:
    """Return decodes with one block copy in either direction."""
    there = BlockCopy(KVTier.DEVICE, 2, KVTier.HOST, 20)
    back = BlockCopy(KVTier.HOST, 3, KVTier.DEVICE, 21)
    return IterationPlan(decodes("a", "c", sampling=GREEDY).sub_batches, (there, back))


def _launched(
    imitated: ImitatedDevice, num_layers: int, plan: IterationPlan
) -> tuple[Counter[str], Counter[str]]:
    """Return Python's launches and signals in an iteration with captured graphs, counted by name."""
    base = random_model(
        tiny_config((None,) * num_layers), dtype=torch.float16, device=torch.device("cpu"), seed=0
    )
    model = Decoder(base.config, dtype=torch.float16, device=torch.device("cuda"), form=DENSE)
    for target, source in zip(named_weights(model), named_weights(base), strict=True):
        target.load(0, source.dense())
    storage = make_storage(model, dict.fromkeys(MEASURED_TIERS, 24), BLOCK_SIZE)
    executor = build_executor(model, storage, 256, 8, None, Streams(model.device))
    executor.execute(prompts("abcdef"))
    for _ in range(2):  # eager, then captured
        executor.execute(plan)
    with imitated.counted_calls() as calls:
        executor.execute(plan)
    executor.close()
    signals = Counter({name: calls.pop(name, 0) for name in SIGNALS})
    return calls, signals


@pytest.mark.parametrize(
    ("plan", "most_per_layer"),
    [
        pytest.param(decodes("abf", sampling=GREEDY), 0, id="decodes of the device"),
        pytest.param(decodes("abcd", "fe", sampling=GREEDY), 0, id="decodes of both places"),
        pytest.param(_mixed("f"), 3, id="a prompt beside decodes"),
        pytest.param(_mixed("f", 9), 4, id="the rest of a prompt beside decodes"),
        pytest.param(_mixed("d"), 5, id="a prompt of host memory beside decodes"),
        pytest.param(_mixed("d", 9), 8, id="the rest of a prompt of host memory beside decodes"),
        pytest.param(_moving(), 5, id="decodes while blocks move"),
    ],
)
def test_python_launches_few_operations(
    imitated: ImitatedDevice, plan: IterationPlan, most_per_layer: int
) -> None:
    few, few_signals = _launched(imitated, FEW, plan)
    many, many_signals = _launched(imitated, MANY, plan)
    per_layer = (many.total() - few.total()) / (MANY - FEW)
    signals = (many_signals.total() - few_signals.total()) / (MANY - FEW)
    beside = few.total() - FEW * per_layer, few_signals.total() - FEW * signals
    print(f"operations per layer {per_layer:g}, beside layers {beside[0]:g}: {dict(many)}")
    print(f"signals per layer {signals:g}, beside layers {beside[1]:g}: {dict(many_signals)}")
    assert per_layer <= most_per_layer
    assert few["graph"] > 0
