"""Traced models with weights and experts in host memory, on streams of any order and on threads."""

from pathlib import Path

import pytest
import torch
from executors import thread_executor
from expert_models import with_shares
from graph_case import BLOCK_SIZE, make_executor
from imitated_streams import ImitatedBackend
from offloaded_case import random_split
from pipeline_case import RandomIterations, check_random_plans, make_storage
from recurrent_models import RECURRENT
from split_models import divided
from torch_layer import TorchLayer
from traced_models import FAMILIES, save

from neo_desktop.engine.kv_tier import MEASURED_TIERS
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import DENSE, Dense
from neo_desktop.models.registry import load_model
from neo_desktop.models.traced.config import read_traced

pytestmark = pytest.mark.usefixtures("kernels")

CPU = torch.device("cpu")


KNOWN = FAMILIES | RECURRENT
MIXTURES = ["qwen3.5-moe", "gemma4-moe", "nemotron-h-moe"]


@pytest.fixture(scope="module", params=["llama", "opt", "phi3", "falcon", "stablelm-parallel", *MIXTURES])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(request.param), *KNOWN.get(request.param, (request.param, {})))


@pytest.fixture(scope="module")
def whole(folder: Path) -> Decoder:
    """The reference model, without offloaded weights."""
    return load_model(open_checkpoint(folder), read_traced(folder), dtype=torch.float32, device=CPU)


def split(folder: Path, seed: int, share: float | None) -> Decoder:
    config = read_traced(folder)
    form = random_split(config, seed, device_form=Dense(uses_tiles=False), host_form=DENSE)
    model = load_model(open_checkpoint(folder), config, dtype=torch.float32, device=CPU, form=form)
    return with_shares(divided(model, seed, share), seed, share)


@pytest.mark.sample(0)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, None])
def test_random_plans_on_streams_of_any_order(folder: Path, whole: Decoder, share: float | None) -> None:
    seed = int(4 * (share or 0)) + 1
    backend = ImitatedBackend(seed, num_queues=(None, 1, 2, 3)[seed % 4])
    executor, _ = make_executor(split(folder, seed, share), backend=backend)
    iterations = RandomIterations(seed, block_size=BLOCK_SIZE)
    check_random_plans(executor.execute, whole, iterations, 5, after=backend.check_flags)
    executor.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, None])
def test_random_plans_on_threads(folder: Path, whole: Decoder, share: float | None) -> None:
    seed = int(4 * (share or 0)) + 2
    model = split(folder, seed, share)
    storage = make_storage(model, dict.fromkeys(MEASURED_TIERS, 24), BLOCK_SIZE, device_kind=TorchLayer)
    executor, iterations = thread_executor(model, storage), RandomIterations(seed, 24, block_size=BLOCK_SIZE)
    check_random_plans(executor.execute, whole, iterations, 5)
    executor.close()
