"""Shared by all tests."""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))  # scripts are not part of the package

# Both must be set before torch and transformers are imported. Tests work on small tensors, for which handing
# work to several threads costs more than it brings; and nothing may be looked for on the internet.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from hypothesis import HealthCheck, settings
from ladder_rungs import Rungs, restored_ladder

# Likewise, before Triton is: without a GPU its kernels run in its interpreter, on tensors of the CPU.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell lets what runs in the background ignore Ctrl-C; what tests start shall know it all the same.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("any pace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any pace")  # the computer may be slow, or busy


@pytest.fixture(scope="session", autouse=True)
def _own_cache() -> Iterator[None]:
    """Keep measurements of this computer out of the user's cache, for child processes, too."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEO_DESKTOP_CACHE", folder)
        patch.setenv("NEO_DESKTOP_DOCTOR", "off")  # a GPU may be an imitated one, which child processes lack
        yield


@pytest.fixture(autouse=True)
def rungs() -> Iterator[Rungs]:
    """Sets rungs of the process's ladder; every test leaves the ladder as it was."""
    with restored_ladder() as rungs:
        yield rungs


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
