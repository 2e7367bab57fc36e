"""The authors' benchmarks run and print results; people judge the speeds."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from benchmarks.cost_model import CostModelOptions, run_cost_model
from benchmarks.cpu_attention.measure import run_cpu_attention
from benchmarks.cpu_attention.options import CpuAttentionOptions
from benchmarks.device_limit import DeviceOptions, run_device_limit
from benchmarks.shown import show
from benchmarks.weights_on_gpu import WeightsOptions, measure

TINY: dict[str, Any] = {"shape": "tiny", "device": "cpu", "dtype": "float32"}


def ignore(share: float, what: str) -> None:
    pass


@pytest.mark.parametrize(
    ("measured", "cases"),
    [
        (
            lambda: run_cpu_attention(
                CpuAttentionOptions(
                    groups=(4,),
                    head_dims=(64,),
                    context_tokens=(64,),
                    memory_bytes=64 << 20,
                    seconds=0,
                    rival_seconds=0.1,
                ),
                ignore,
            ),
            "cases",
        ),
        (
            lambda: run_device_limit(
                DeviceOptions(**TINY, batches=(1, 2), context_tokens=20, iterations=2, seconds=0.1), ignore
            ),
            "decode",
        ),
        (
            lambda: measure(
                WeightsOptions(**TINY, shares=(0.6,), prompt_tokens=20, tokens=2, seconds=1.0), ignore
            ),
            "cases",
        ),
        (
            lambda: run_cost_model(
                CostModelOptions(**TINY, points=4, repeated=2, rounds=2, seconds=0.5), ignore
            ),
            "cases",
        ),
    ],
)
def test_a_benchmark_has_cases_and_can_be_shown(measured: Callable[[], Iterable[Any]], cases: str) -> None:
    assert getattr(show(measured()), cases)
