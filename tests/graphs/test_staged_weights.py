"""Weights in pageable memory pass through pinned buffers, on streams and in graphs."""

from dataclasses import replace

import pytest
import torch
from expert_models import expert_model
from fallback_levels import Levels
from graph_case import BLOCK_SIZE, contexts, decodes, make_executor, prompts
from imitated_device import ALWAYS, OUT_OF_MEMORY, ImitatedDevice, needs_imitated_gpu
from imitated_streams import ImitatedBackend
from pipeline_case import (
    RandomIterations,
    check_random_plans,
    check_result,
    make_storage,
    tiny_config,
    tiny_model,
)
from seeds import seeds
from split_models import divided, host_model, split_model
from torch import Tensor

from neo_desktop.engine.cuda.pinned import weight_bytes
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.execute import weight_stream
from neo_desktop.engine.execute.build import build_executor
from neo_desktop.engine.execute.lane import Lane
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kv_tier import MEASURED_TIERS
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import DENSE, Dense
from neo_desktop.models.linear.offloaded import OffloadedFormat
from neo_desktop.models.linear.shares import StreamedShares

WINDOWS = (None, 5, None)


@pytest.fixture(scope="module")
def whole() -> Decoder:
    """The reference model, without offloaded weights."""
    return tiny_model(WINDOWS)


@pytest.fixture
def _staged(monkeypatch: pytest.MonkeyPatch, kernels: None) -> None:
    """Treat all weights as pageable."""
    monkeypatch.setattr(weight_stream, "needs_staging", lambda source, device: True)


@pytest.fixture
def _partly_staged(monkeypatch: pytest.MonkeyPatch, kernels: None) -> None:
    """Treat every other matrix as pinned."""
    seen: dict[int, int] = {}

    def needs_staging(source: Tensor, device: torch.device) -> bool:
        return seen.setdefault(source.untyped_storage().data_ptr(), len(seen)) % 2 == 0

    monkeypatch.setattr(weight_stream, "needs_staging", needs_staging)


@pytest.mark.usefixtures("_staged")
@pytest.mark.parametrize("level", ["host-flags", "device-only"])
@pytest.mark.parametrize("seed", seeds(2, 4))
def test_random_plans_on_streams_of_any_order(whole: Decoder, levels: Levels, level: str, seed: int) -> None:
    levels(graphs=level)
    backend = ImitatedBackend(seed, num_queues=(None, 1, 2, 3)[seed % 4])
    executor, _ = make_executor(split_model(seed, WINDOWS), backend=backend)
    iterations = RandomIterations(seed, block_size=BLOCK_SIZE)
    check_random_plans(executor.execute, whole, iterations, 8, after=backend.check_flags)
    executor.close()


@pytest.mark.usefixtures("_partly_staged")
@pytest.mark.parametrize("seed", seeds(2, 4))
def test_some_are_pinned(whole: Decoder, seed: int) -> None:
    backend = ImitatedBackend(seed, num_queues=(None, 1, 2, 8)[seed % 4])
    executor, _ = make_executor(host_model(0.7, WINDOWS), backend=backend)
    iterations = RandomIterations(seed, block_size=BLOCK_SIZE)
    check_random_plans(executor.execute, whole, iterations, 6)
    executor.close()


@pytest.mark.usefixtures("_staged")
@pytest.mark.parametrize("num_queues", [None, 1, 2, 8])
def test_decodes_are_still_one_graph(whole: Decoder, num_queues: int | None) -> None:
    backend = ImitatedBackend(num_queues or 0, num_queues=num_queues)
    executor, _ = make_executor(host_model(0.5, WINDOWS), backend=backend)
    executor.execute(prompts("abcdef"))
    for step in range(3):
        plan = decodes("abcd", "fe", step=step)
        result = executor.execute(plan)
        check_result(whole, plan, contexts(plan), result)
        assert backend.num_graphs_launched == (step > 0)
        copies = [o for o in backend.operations if o.lane is Lane.WEIGHTS and o.stage.name == "weights"]
        waits = [o for o in backend.operations if o.lane is Lane.WEIGHTS and o.is_wait]
        assert len(copies) == len(waits) == 2 * 4 * len(WINDOWS)  # of both sub-batches
        backend.check_flags()
    executor.close()


@pytest.mark.usefixtures("_partly_staged")
@pytest.mark.parametrize("seed", seeds(2, 3))
def test_experts_that_are_streamed(seed: int) -> None:
    """The three matrices of a piece pass through the buffers one by one, or directly."""
    model = expert_model(seed, WINDOWS)
    model.streamed_experts = StreamedShares((1,), (0.6,))
    executor, _ = make_executor(model, backend=ImitatedBackend(seed, num_queues=(None, 1, 2)[seed]))
    reference = expert_model(windows=WINDOWS)
    executor.execute(prompts("abcdef"))
    for step in range(3):
        plan = decodes("abcd", "fe", step=step)
        check_result(reference, plan, contexts(plan), executor.execute(plan))
    executor.close()


def test_what_is_pinned_goes_straight() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    pageable = torch.zeros(8, dtype=torch.uint8)
    assert weight_stream.needs_staging(pageable, cuda)
    assert not weight_stream.needs_staging(pageable, cpu)


def test_where_nothing_can_be_pinned_buffers_would_be_of_no_use(levels: Levels) -> None:
    levels(host_memory="pageable")
    pageable = torch.zeros(8, dtype=torch.uint8)
    assert not weight_stream.needs_staging(pageable, torch.device("cuda"))


@needs_imitated_gpu[0]
@needs_imitated_gpu[1]
@pytest.mark.parametrize("level", ["host-flags", "device-only"])
def test_with_a_driver_that_pins_no_weights(imitated: ImitatedDevice, levels: Levels, level: str) -> None:
    """Decode iterations are still graphs if flags signal the CPU."""
    levels(graphs=level)
    imitated.fail("cudaHostRegister", OUT_OF_MEMORY, times=ALWAYS)
    names = [name for name, _ in tiny_config(WINDOWS).each_matrix() if name != "head"]
    form = OffloadedFormat(
        Dense(uses_tiles=False), replace(DENSE, room=weight_bytes), dict.fromkeys(names, 0)
    )
    model = divided(tiny_model(WINDOWS, device="cuda", form=form), 0, 0.5)
    assert imitated.num_failed
    reference = tiny_model(WINDOWS, device="cuda")
    storage = make_storage(model, dict.fromkeys(MEASURED_TIERS, 24), BLOCK_SIZE)
    executor = build_executor(model, storage, 256, 8, None, Streams(model.device))
    assert executor.fits_graphs
    executor.execute(prompts("abcdefg"))
    for step in range(3):
        plan = decodes("acd", "bfe", step=step)
        check_result(reference, plan, contexts(plan), executor.execute(plan), tolerance=2e-3)
    assert executor._backend.has_graphs is (level == "host-flags")
    assert fallbacks.level("host_memory") == "pinned"
    executor.close()
