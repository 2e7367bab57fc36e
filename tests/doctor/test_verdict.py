"""Verdicts apply only to the exact machine and versions they were recorded for, and limit later starts."""

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from neo_desktop.engine.cache_files import Key
from neo_desktop.engine.doctor import verdict as verdicts
from neo_desktop.engine.doctor.first_start import check_at_first_start, subject_key
from neo_desktop.engine.doctor.outcome import Outcome, Result
from neo_desktop.engine.doctor.trials import Subject
from neo_desktop.engine.doctor.verdict import Verdict, keep, new_verdict, read_verdict, verdict_path
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.fallbacks import MECHANISMS, fallbacks
from neo_desktop.engine.profiling import profile_cache

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CHILD = (sys.executable, str(Path(__file__).with_name("failing_child.py")))
SUBJECT = Subject(shape="tiny", dtype="float32", is_quick=True)


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NEO_DESKTOP_CACHE", str(tmp_path))
    monkeypatch.delenv("NEO_DESKTOP_DOCTOR")
    with fallbacks.at_levels({}):
        yield


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    properties = SimpleNamespace(name="Card", major=7, minor=5, total_memory=1 << 34)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    return properties


def verdict(key: Key, *, level: str = "triton") -> Verdict:
    failed = Outcome("norm", "Norm", "norm", level, Result.CRASHED, "it ended its process: SIGSEGV")
    return new_verdict(key, [failed], is_quick=False)


def test_a_verdict_is_found_again_and_limits_the_ladder(caplog: pytest.LogCaptureFixture) -> None:
    key = subject_key(SUBJECT, CPU)
    assert read_verdict(key) is None
    keep(verdict(key))
    found = read_verdict(key)
    assert found is not None
    assert found.outcomes == verdict(key).outcomes
    with caplog.at_level(logging.WARNING):
        found.apply(fallbacks)
    assert fallbacks.limits() == {"norm": "torch"}
    assert [message.count("SIGSEGV") for message in caplog.messages] == [1]


def test_another_shape_dtype_version_or_torch_is_another_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(verdict(subject_key(SUBJECT, CPU)))
    for other in (Subject(shape="llama-3.2-1b", dtype="float32"), Subject(shape="tiny", dtype="bfloat16")):
        assert read_verdict(subject_key(other, CPU)) is None
    isas = SimpleNamespace(available_isas=lambda: ["x"])
    for module, name, value in ((profile_cache, "__version__", "99"), (verdicts, "native", isas)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, value)
            assert read_verdict(subject_key(SUBJECT, CPU)) is None
    monkeypatch.setattr(torch, "__version__", "99")
    assert read_verdict(subject_key(SUBJECT, CPU)) is None


def test_another_gpu_or_driver_is_another_verdict(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(verdict(subject_key(SUBJECT, CUDA)))
    assert read_verdict(subject_key(SUBJECT, CUDA)) is not None
    gpu.name = "Another card"
    assert read_verdict(subject_key(SUBJECT, CUDA)) is None
    gpu.name = "Card"
    monkeypatch.setattr(profile_cache.hardware, "driver_version", lambda: "999.1")
    assert read_verdict(subject_key(SUBJECT, CUDA)) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"key": 1}', "{key}"])
def test_a_damaged_file_is_no_verdict(text: str) -> None:
    key = subject_key(SUBJECT, CPU)
    path = verdict_path(key)
    path.parent.mkdir()
    path.write_text(text.replace("{key}", json.dumps({"key": key, "outcomes": [{"name": 1}]})))
    assert read_verdict(key) is None


def test_a_gpu_is_checked_once(gpu: SimpleNamespace) -> None:
    told: list[str] = []
    subject = Subject(model="good", shape="tiny", dtype="float32", is_quick=True)
    first = check_at_first_start(subject, CUDA, lambda share, what: told.append(what), CHILD)
    assert first is not None
    assert told == ["first start on this GPU: Well"]
    again = check_at_first_start(subject, CUDA, None, ("no such program",))
    assert again is not None
    assert again.outcomes == first.outcomes


def test_what_fails_at_the_first_start_is_done_without(
    gpu: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_at_first_start(SUBJECT, CUDA, None, CHILD)
    assert fallbacks.limits() == {"graphs": "eager", "paged_decode": "torch", "norm": "torch"}
    for title in ("Iterations of decodes", "Decode attention", "Residual and normalisation", "Leave"):
        assert [title in message for message in caplog.messages].count(True) == 1
    with fallbacks.at_levels(dict.fromkeys(["norm", "paged_decode"], "triton")):
        check_at_first_start(SUBJECT, CUDA, None, ("no such program",))
        assert fallbacks.level("norm") == "torch"


def test_a_gpu_that_fails_on_every_rung_is_refused_with_what_to_do(gpu: SimpleNamespace) -> None:
    subject = Subject(model="bad", shape="tiny", dtype="float32", is_quick=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"every fallback level.*--device cpu"):
            check_at_first_start(subject, CUDA, None, CHILD)


def test_a_cpu_is_not_checked_at_a_start_and_the_checks_can_be_left_out(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_at_first_start(SUBJECT, CPU, None, ("no such program",)) is None
    monkeypatch.setenv("NEO_DESKTOP_DOCTOR", "off")
    assert check_at_first_start(SUBJECT, CUDA, None, ("no such program",)) is None


def test_an_engine_knows_of_the_verdict() -> None:
    isas = MECHANISMS["isa"].levels
    failed = Outcome("isa", "ISA", "isa", isas[0].name, Result.FAILED, "it is wrong")
    keep(new_verdict(subject_key(SUBJECT, CPU), [failed], is_quick=False))
    if len(isas) == 1:
        pytest.skip("this CPU has one instruction set only")
    with Engine.from_pretrained(shape="tiny", device="cpu", dtype="float32", policy="gpu-only"):
        assert fallbacks.level("isa") == isas[1].name
