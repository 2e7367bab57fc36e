"""All checks of a first start pass on a working GPU."""

from pathlib import Path

import pytest
import torch
from imitated_device import imitated_device

from neo_desktop.engine.doctor.trials import Subject
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.profiling import budget, warm_up
from neo_desktop.engine.selfcheck import answers, kernel_checks, kv_checks, offload_checks
from neo_desktop.engine.selfcheck.__main__ import checks_of


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_that_works_passes_all_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEO_DESKTOP_CACHE", str(tmp_path))
    monkeypatch.setattr(offload_checks, "SECONDS", {True: 0.1, False: 0.1})
    if imitated_device() is not None:  # its interpreter takes milliseconds for every program of a kernel
        monkeypatch.setattr(kv_checks, "LENGTHS", ((1,), (40, 16, 1)))
        monkeypatch.setattr(kv_checks, "MANY", 2)
        monkeypatch.setattr(kernel_checks, "ROWS", (1, 3))
        monkeypatch.setattr(offload_checks, "CHAIN", 4)
        monkeypatch.setattr(answers, "PROMPT_TOKENS", (1, 17))
        monkeypatch.setattr(answers, "ANSWER_TOKENS", 4)
        monkeypatch.setattr(answers, "CACHE_TOKENS", 256)
        monkeypatch.setattr(answers, "MAX_REQUESTS", 2)
        monkeypatch.setattr(budget, "MAX_BATCH_TOKENS", {"cuda": 64})
        monkeypatch.setattr(warm_up, "NUM_BLOCKS", 16)
    failed, names = {}, []
    with fallbacks.at_levels({}):
        for check in checks_of(Subject(shape="tiny", device="cuda", dtype="float32", is_quick=True)):
            names.append(check.name)
            try:
                check.run()
            except Exception as error:
                failed[check.name] = repr(error)
    assert not failed
    assert {"paged_decode-triton", "graphs-host-flags", "answers-graphs-host-flags", "memory"} <= set(names)
