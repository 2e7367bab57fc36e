"""Default model and suites of the bench."""

import pytest
import torch

from neo_desktop.app.bench import hardware, run
from neo_desktop.app.bench.host_rates import Probe
from neo_desktop.app.bench.options import BenchOptions
from neo_desktop.app.bench.run import default_model
from neo_desktop.engine.profiling.hardware import HostMemory

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free_gib", "cap_gib", "expected"),
    [
        (130, None, "llama-3.1-8b"),
        (130, 15, "llama-3.2-3b"),
        (15, 130, "llama-3.2-3b"),
        (130, 1, "smollm2-135m"),
        (130, 0.1, "smollm2-135m"),  # the smallest model: its error names the missing memory
    ],
)
def test_the_largest_model_that_leaves_room_under_the_cap(
    free_gib: int, cap_gib: float | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "choose_device", torch.device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_gib * GIB, 140 * GIB))
    chosen, note = default_model("cuda", cap_gib)
    assert chosen == expected
    assert f"random weights in the shape of {expected}" in note
    assert "GB of GPU memory" in note


@pytest.mark.parametrize(
    ("free_gib", "gflop_per_s", "read_gb_per_s", "expected"),
    [
        (64, 2000.0, 200.0, "llama-3.2-3b"),  # a workstation
        (64, 1000.0, 65.0, "llama-3.2-1b"),  # a desktop
        (16, 1000.0, 65.0, "qwen2.5-0.5b"),  # the same with little memory
        (16, 300.0, 22.0, "qwen2.5-0.5b"),  # an old laptop
        (16, 60.0, 5.0, "smollm2-135m"),
        (0.5, 1.0, 1.0, "smollm2-135m"),
    ],
)
def test_on_a_cpu_the_largest_model_that_is_quick_enough(
    free_gib: float,
    gflop_per_s: float,
    read_gb_per_s: float,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    available = HostMemory(int(64 * GIB), int(free_gib * GIB), None)
    monkeypatch.setattr(run, "host_memory", lambda: available)
    monkeypatch.setattr(run, "probe_bytes", lambda: 4096)
    monkeypatch.setattr(run.Host, "probe", lambda self: Probe(gflop_per_s, read_gb_per_s))
    chosen, note = default_model("cpu")
    assert chosen == expected
    assert f"a CPU that reads {read_gb_per_s:.3g} GB/s" in note.replace(".0 GB", " GB")


def test_the_suite_hardware_gets_the_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(device: object, gpu_slice: int) -> None:
        raise ValueError(f"a slice of {gpu_slice}")

    monkeypatch.setattr(hardware, "open_streams", opened)
    with pytest.raises(ValueError, match="a slice of 16"):
        next(run.SUITES["hardware"](BenchOptions(device="cpu", gpu_slice=16), lambda share, what: None))
