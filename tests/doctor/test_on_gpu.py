"""All checks of a first start pass on a GPU that works."""

import os
from pathlib import Path

import pytest
import torch

from neo_desktop.engine.doctor.trials import Subject
from neo_desktop.engine.ladder import ladder
from neo_desktop.engine.trial import hand_off_checks
from neo_desktop.engine.trial.__main__ import checks_of


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(
    "TRITON_INTERPRET" in os.environ, reason="an imitated GPU lacks some of torch's operators"
)
def test_a_gpu_that_works_passes_all_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEO_DESKTOP_CACHE", str(tmp_path))
    monkeypatch.setattr(hand_off_checks, "SECONDS", {True: 0.1, False: 0.1})
    failed, names = {}, []
    with ladder.standing_on({}):
        for check in checks_of(Subject(shape="tiny", device="cuda", dtype="float32", is_quick=True)):
            names.append(check.name)
            try:
                check.run()
            except Exception as error:
                failed[check.name] = repr(error)
    assert not failed
    assert {"paged_decode-triton", "graphs-relay", "answers-graphs-host-flags", "memory"} <= set(names)
