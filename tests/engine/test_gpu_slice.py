"""A slice of the GPU: the driver receives correct requests, and no work runs outside the slice."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCublas, FakeDriver, FakeTorchCuda, RecordedStreams
from pipeline_case import RandomIterations, check_random_plans, make_storage, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine import loading
from neo_desktop.engine.cuda.driver import GreenContext, open_driver
from neo_desktop.engine.cuda.streams import GpuSlice, Streams, open_streams
from neo_desktop.engine.execute.backend import ThreadBackend
from neo_desktop.engine.execute.build import build_executor
from neo_desktop.engine.kv.storage import KVPool
from neo_desktop.engine.kv_tier import MEASURED_TIERS
from neo_desktop.engine.profiling import warm_up
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.stages import Stages

GPU = torch.device("cuda", 1)


@pytest.fixture
def torch_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorchCuda]:
    yield FakeTorchCuda(monkeypatch)
    assert torch._C._get_sm_carveout_experimental() is None


def make_slice(
    num_sms: int = 8, driver: FakeDriver | None = None, cublas: FakeCublas | None = None
) -> GpuSlice:
    return GpuSlice(GPU, num_sms, driver or FakeDriver(), cublas or FakeCublas())


@pytest.mark.parametrize(("asked", "message"), [(133, "this GPU has 132"), (131, "or for all 132")])
def test_more_than_the_gpu_can_give_is_told(asked: int, message: str) -> None:
    driver = FakeDriver(total_sms=132)
    with pytest.raises(ValueError, match=message):
        GreenContext(driver, 0, asked)
    assert driver.open_contexts == 0


@pytest.mark.parametrize(
    "name",
    [
        "cuInit",
        "cuDeviceGet",
        "cuDeviceGetDevResource",
        "cuDevSmResourceSplitByCount",
        "cuDevResourceGenerateDesc",
        "cuGreenCtxCreate",
        "cuGreenCtxStreamCreate",
    ],
)
def test_a_failed_call_is_named_and_leaves_nothing(name: str, torch_cuda: FakeTorchCuda) -> None:
    driver = FakeDriver()
    driver.fail[name] = 2
    with pytest.raises(RuntimeError, match=f"{name} failed with error 2"):
        make_slice(driver=driver)
    assert driver.open_contexts == 0


def test_a_slice_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="--gpu-slice needs an NVIDIA GPU"):
        Engine.from_pretrained(device="cpu", gpu_slice=8)


def test_without_a_slice_nothing_is_asked_of_anybody() -> None:
    streams = open_streams(torch.device("cpu"))
    assert isinstance(streams, Streams)
    assert (streams.sms, streams.note) == (None, None)
    with streams.on_device():
        pass


def test_work_inside_goes_to_the_slices_stream_and_in_order(torch_cuda: FakeTorchCuda) -> None:
    driver, cublas = FakeDriver(), FakeCublas()
    slice_ = make_slice(10, driver, cublas)
    thread = threading.get_ident()
    with slice_.on_device():
        main = torch_cuda.current
        assert main.handle in driver.streams
        assert main.device == GPU
        assert main.waited_for == [torch_cuda.default]
        assert cublas.targets[thread] == 16
        assert torch._C._get_sm_carveout_experimental() == 132 - 16
        with slice_.on_device():
            assert torch_cuda.current is main
        assert cublas.targets[thread] == 16
    assert torch_cuda.current is torch_cuda.default
    assert torch_cuda.default.waited_for == [main]
    assert cublas.targets[thread] == 0
    assert slice_.note == "All GPU work runs on 16 of the GPU's 132 multiprocessors."


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RecordedStreams:
    """Return CPU streams, outside which model computation and KV allocation fail."""
    monkeypatch.setenv("NEO_DESKTOP_CACHE", str(tmp_path))
    recorded = RecordedStreams()
    monkeypatch.setattr(loading, "open_streams", lambda *_: recorded)
    for owner, name in (
        (Decoder, "__init__"),
        *((Stages, each) for each in ("embed", "advance", "logits")),
        (KVPool, "__init__"),
    ):
        method = getattr(owner, name)

        def inside(*args: object, method: object = method, **kwargs: object) -> object:
            assert recorded.is_inside, f"{method} outside the slice"
            return method(*args, **kwargs)  # type: ignore[operator]

        monkeypatch.setattr(owner, name, inside)
    monkeypatch.setattr(ThreadBackend, "on_device", lambda _: recorded.on_device())
    return recorded


def test_an_engine_loads_measures_and_generates_inside(streams: RecordedStreams) -> None:
    with Engine.from_pretrained(
        shape="tiny", device="cpu", gpu_slice=8, policy="neo", gpu_cache_tokens=256, cpu_cache_tokens=1024
    ) as engine:
        assert engine.stats().gpu_sms == 8
        outputs = []
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        thread = threading.Thread(target=lambda: outputs.extend(engine.generate([[1, 2, 3]] * 20, params)))
        thread.start()
        thread.join()
        assert [len(output.token_ids) for output in outputs] == [4] * 20
    assert not streams.is_inside


# The tests below need a GPU.

on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def gpu(function: Callable[..., None]) -> Callable[..., None]:
    for mark in on_a_gpu:
        function = mark(function)
    return function


def is_in_a_slice(stream: torch.cuda.Stream) -> bool:
    """Ask the driver whether the stream belongs to a slice."""
    result, context = open_driver().cuStreamGetGreenCtx(stream.cuda_stream)
    assert result == 0
    return int(context) != 0


@gpu
def test_kernels_in_a_slice_see_no_other_multiprocessors() -> None:
    from smid_kernel import multiprocessors  # noqa: PLC0415 - Triton is installed with a GPU

    streams = open_streams(torch.device("cuda"), 8)
    assert streams.sms is not None
    assert 8 <= streams.sms < len(multiprocessors())
    with streams.on_device():
        used = multiprocessors()
        beside = streams.stream()
        with torch.cuda.stream(beside):
            used |= multiprocessors()
    assert 0 < len(used) <= streams.sms


@gpu
def test_a_graph_captured_in_a_slice_stays_there() -> None:
    from smid_kernel import buffers, launch  # noqa: PLC0415

    streams = open_streams(torch.device("cuda"), 8)
    assert streams.sms is not None
    with streams.on_device():
        sms, spun = buffers()
        launch(sms, spun)  # compiles the kernel
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams.stream()):
            launch(sms, spun)
        sms.fill_(-1)
        graph.replay()
        used = set(sms.tolist())
    assert -1 not in used
    assert len(used) <= streams.sms


@gpu
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 48, 128, 512, 2048])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_in_a_slice_are_those_of_the_whole_gpu(tokens: int, has_bias: bool) -> None:
    streams = open_streams(torch.device("cuda"), 8)
    torch.manual_seed(0)
    for rows, columns in ((4096, 4096), (12288, 4096), (22016, 4096), (4096, 11008), (896, 896), (1152, 896)):
        x = torch.randn(tokens, columns, dtype=torch.float16, device="cuda")
        weight = torch.randn(rows, columns, dtype=torch.float16, device="cuda") / columns**0.5
        bias = torch.randn(rows, dtype=torch.float16, device="cuda") if has_bias else None
        with streams.on_device():
            product = torch.nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(product, torch.nn.functional.linear(x, weight, bias), atol=2e-2, rtol=2e-2)


class Watchdog(TorchDispatchMode):
    """Dispatch mode that checks the stream of every GPU operation of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.num_inside = 0
        self.outside: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(x, torch.Tensor) and x.is_cuda for x in tree_leaves((args, kwargs, result))):
            if is_in_a_slice(torch.cuda.current_stream()):
                self.num_inside += 1
            else:
                self.outside.append(str(func))
        return result


@gpu
@pytest.mark.timeout(900)
def test_no_operation_of_an_engine_is_outside_its_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    # Warm-up runs the largest iterations. On an imitated GPU, long contexts would take minutes.
    monkeypatch.setattr(warm_up, "NUM_BLOCKS", 16)
    open_streams(torch.device("cuda"), 8)  # creates the CUDA context with an operation of its own
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    with (
        Watchdog() as watch,
        Engine.from_pretrained(
            shape="tiny",
            gpu_slice=8,
            policy="neo",
            gpu_cache_tokens=512,
            cpu_cache_tokens=512,
            max_batch_tokens=96,
            max_batch_requests=4,
        ) as engine,
    ):
        engine.generate([[1, 2, 3] * size for size in range(1, 30, 14)], params)
    assert watch.outside == []
    assert watch.num_inside > 1000


@gpu
def test_an_executor_in_a_slice_gives_the_tokens_of_a_plain_computation() -> None:
    model = tiny_model(device="cuda")
    storage = make_storage(model, dict.fromkeys(MEASURED_TIERS, 24))
    executor = build_executor(model, storage, 256, 8, None, open_streams(model.device, 8))
    iterations = RandomIterations(0)
    check_random_plans(executor.execute, model, iterations, 12, tolerance=2e-3)
    executor.close()
