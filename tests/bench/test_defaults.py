"""What is measured when nobody says what."""

import pytest
import torch

from neo_desktop.app.bench import defaults
from neo_desktop.app.bench.defaults import default_model, suite_options
from neo_desktop.app.model_options import ModelOptions

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free_gib", "cap_gib", "expected"),
    [
        (130, None, "llama-3.1-8b"),
        (130, 15, "llama-3.2-3b"),
        (15, 130, "llama-3.2-3b"),
        (130, 1, None),
    ],
)
def test_the_largest_model_that_leaves_room_under_the_cap(
    free_gib: int, cap_gib: float | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "choose_device", torch.device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_gib * GIB, 140 * GIB))
    assert default_model("cuda", cap_gib) == expected


@pytest.mark.parametrize("quick", [False, True])
def test_a_slice_is_for_every_suite_that_uses_the_gpu(quick: bool) -> None:
    model = ModelOptions(device="cpu", gpu_slice=16)
    options = suite_options(model, quick=quick, cpu_attention={}, throughput={}, load={})
    suites = (options, options.hardware, options.gpu, options.cost_model, options.throughput, options.load)
    assert [suite.gpu_slice for suite in suites] == [16] * 6
