"""Cancelling a start because the model is no longer wanted does not make the next start careful."""

import os
import time
from pathlib import Path

import pytest
import torch

from neo_desktop.app.engines.process import EngineProcess
from neo_desktop.engine.doctor.safe_start import begin_start
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.progress import Progress


class UnwantedError(Exception):
    """Raised by the progress callback to cancel a start."""


def start_for_ever(progress: Progress) -> Engine:
    begin_start(torch.device("cpu"))
    progress(0.5, "the start has begun")
    while True:
        time.sleep(1)


def start_and_crash(progress: Progress) -> Engine:
    begin_start(torch.device("cpu"))
    os.abort()


@pytest.fixture(autouse=True)
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)  # for the child
    monkeypatch.setenv("NEO_DESKTOP_CACHE", str(tmp_path))
    return tmp_path / "starts"


def test_an_unwanted_start_leaves_no_mark(marks: Path) -> None:
    def watch(share: float, what: str) -> None:
        if what == "the start has begun":
            raise UnwantedError

    with pytest.raises(UnwantedError):
        EngineProcess.load(start_for_ever, watch)
    assert not list(marks.iterdir())


def test_a_start_that_crashes_leaves_one(marks: Path) -> None:
    with pytest.raises(RuntimeError, match="SIGABRT"):
        EngineProcess.load(start_and_crash, lambda share, what: None)
    assert len(list(marks.glob("*.mark"))) == 1
