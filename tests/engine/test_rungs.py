"""The engine works without mechanisms that a system refuses or a user disables, with the same tokens."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
from fallback_levels import Levels

from neo_desktop.engine.fallbacks import MECHANISMS, fallbacks, variable
from neo_desktop.engine.profiling import hardware

ANSWER = """
import json
from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.fallbacks import fallbacks
prompts = [[(7 * i + 3 * n) % 200 for i in range(n)] for n in (5, 40, 130)]
sizes = dict.fromkeys(("gpu_cache_tokens", "cpu_cache_tokens"), 1024)
with Engine.from_pretrained(
    shape="tiny", device="cpu", policy="{policy}", max_batch_tokens=64, max_batch_requests=4, **sizes
) as engine:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    tokens = [list(result.token_ids) for result in engine.generate(prompts, params)]
print(json.dumps([tokens, dict(fallbacks.limits())]))
"""


def answer(policy: str, levels: Mapping[str, str]) -> tuple[list[list[int]], dict[str, str]]:
    """Return the tokens of an engine in its own process, and its final levels below the highest."""
    result = subprocess.run(
        [sys.executable, "-P", "-c", ANSWER.replace("{policy}", policy)],
        env=os.environ | {variable(mechanism): level for mechanism, level in levels.items()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    tokens, limits = json.loads(result.stdout)
    return tokens, limits


def test_the_lowest_rungs_give_the_same_tokens() -> None:
    lowest = {name: mechanism.levels[-1].name for name, mechanism in MECHANISMS.items()}
    expected, _ = answer("fastdecode", {})
    assert [len(tokens) for tokens in expected] == [12, 12, 12]
    found, limits = answer("fastdecode", lowest)
    assert limits == lowest
    assert found == expected


def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="Tesla T4", multi_processor_count=40, major=7, minor=5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (12 << 30, 15 << 30))


def refuse() -> None:
    raise hardware.pynvml.NVMLError(hardware.pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


@pytest.mark.parametrize("forced", [True, False])
def test_without_nvml_torch_describes_the_gpu(
    forced: bool, monkeypatch: pytest.MonkeyPatch, levels: Levels
) -> None:
    a_gpu(monkeypatch)
    if forced:
        levels(nvml="without")
        monkeypatch.setattr(hardware.pynvml, "nvmlInit", lambda: pytest.fail("the driver was asked"))
    else:
        monkeypatch.setattr(hardware.pynvml, "nvmlInit", refuse)
    (gpu,), note, (unknown,) = hardware.find_gpus()
    assert (gpu.name, gpu.sms, gpu.capability, gpu.memory_bytes) == ("Tesla T4", 40, "7.5", 15 << 30)
    assert gpu.free_bytes == 12 << 30
    assert note == ""
    assert "PCIe" in unknown
    assert fallbacks.limits() == {"nvml": "without"}
    assert hardware.driver_version().startswith("unknown")


def test_without_a_gpu_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(hardware.pynvml, "nvmlInit", refuse)
    gpus, note, _ = hardware.find_gpus()
    assert not gpus
    assert "no NVIDIA driver" in note
    assert not fallbacks.limits()
