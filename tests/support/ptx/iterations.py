"""Tests of whole iterations, for `plugin`: compiled kernels give the tokens of a plain computation.

Prompts in chunks, decodes and moves between device and host memory run as on a GPU, on CPU threads. Norm,
activation, rotation, copies of rows and decode attention of the device's requests are compiled kernels.
"""

from collections.abc import Iterator

import pytest
import torch
from executors import thread_executor
from fallback_levels import kernels_on
from pipeline_case import RandomIterations, check_random_plans, make_storage, tiny_config, tiny_model

from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.kv import device_layer
from neo_desktop.engine.kv.device_layer import DeviceLayer
from neo_desktop.engine.kv_tier import MEASURED_TIERS
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.registry import random_model, stages_of

NUM_BLOCKS, BLOCK_SIZE = 12, 16


def check(model: Decoder, seed: int, tolerance: float) -> None:
    storage = make_storage(
        model, dict.fromkeys(MEASURED_TIERS, NUM_BLOCKS), BLOCK_SIZE, device_kind=DeviceLayer
    )
    executor = thread_executor(model, storage, stages=stages_of(model, dispatch))
    iterations = RandomIterations(seed, NUM_BLOCKS, block_size=BLOCK_SIZE)
    check_random_plans(executor.execute, model, iterations, 6, tolerance)
    executor.close()


@pytest.fixture(autouse=True)
def _compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(device_layer, "num_sms", lambda device: 4)
    with kernels_on("triton"):
        yield


def test_float32() -> None:
    check(tiny_model(attention_sinks=True, softcap=0.5), 1, 2e-4)


@torch.inference_mode()
def test_float16() -> None:
    """Heads of tensor cores; the tolerance is that of float16 matmuls."""
    model = random_model(tiny_config(), dtype=torch.float16, device=torch.device("cpu"), seed=0)
    check(model, 2, 2e-2)
