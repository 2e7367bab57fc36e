"""The authors' benchmarks run and print results; people judge the speeds."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from benchmarks import device_limit, weights_on_gpu
from benchmarks.cost_model import CostModelOptions, run_cost_model
from benchmarks.cpu_attention.measure import run_cpu_attention
from benchmarks.cpu_attention.options import CpuAttentionOptions
from benchmarks.shown import show
from neo_desktop.engine.options import EngineOptions

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
            lambda: run_cost_model(
                CostModelOptions(**TINY, points=4, repeated=2, rounds=2, seconds=0.5), ignore
            ),
            "cases",
        ),
    ],
)
def test_a_benchmark_has_cases_and_can_be_shown(measured: Callable[[], Iterable[Any]], cases: str) -> None:
    assert getattr(show(measured()), cases)


def test_decodes_are_compared_with_the_devices_limit() -> None:
    rows = list(device_limit.measure(EngineOptions(**TINY), (1, 2), 20, count=2))
    assert [row.batch for row in rows] == [0, 1, 2]
    assert all(row.share > 0 and row.step_ms > 0 for row in rows)


def test_weights_in_host_memory_are_measured_in_each_way() -> None:
    cases = list(weights_on_gpu.measure(EngineOptions(**TINY), (0.6,), prompt_tokens=20, tokens=2))
    assert [case.way for case in cases] == list(weights_on_gpu.WAYS)
    assert all(case.bound_share > 0 for case in cases)
