"""Environment, hypothesis profiles and fixtures that all tests share."""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from zlib import crc32

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))  # scripts are not part of the package

# Both must be set before torch and transformers are imported. Tests use small tensors, for which several
# threads cost more than they gain, and no test may access the internet.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from fallback_levels import Levels, restored_fallbacks
from hypothesis import HealthCheck, settings
from quick_processes import profile_briefly, quick_processes

from neo_desktop.engine import setup

# Must be set before Triton is imported: without a GPU, kernels run in its interpreter, on CPU tensors.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Shells make background jobs ignore Ctrl-C; processes started by tests must react to it all the same.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "any pace",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("CI") == "true",  # CI tries the same inputs each time
)
settings.load_profile("any pace")  # the computer may be slow, or busy


@pytest.fixture(scope="session", autouse=True)
def _surroundings() -> Iterator[None]:
    """Measure this computer briefly, outside the user's cache, and start child processes quickly."""
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        quick_processes() if sys.platform == "linux" else nullcontext(),
    ):
        profile_briefly()
        patch.setenv("NEO_DESKTOP_CACHE", folder)
        patch.setattr(setup, "MOST_DISK_BYTES", 0)  # tests share models: none may find another one's KV
        patch.setenv("NEO_DESKTOP_DOCTOR", "off")  # child processes lack an imitated GPU
        yield


@pytest.fixture(autouse=True)
def levels() -> Iterator[Levels]:
    """Setter of the process's fallback levels; every test restores them."""
    with restored_fallbacks() as levels:
        yield levels


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pytest_collection_finish() -> None:
    """Let the collector, which every engine calls as it ends, pass over what was imported: 1 s each time."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every parameter set of tests marked `sample`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --all, keep the number of parameter sets in a test's `sample` mark."""
    if config.getoption("--all"):
        return
    sets: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sample"):
            sets.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = set()
    for same in sets.values():
        mark = same[0].get_closest_marker("sample")
        assert mark is not None
        kept = {item.nodeid for item in _varied(same, mark.args[0])}
        left_out |= {item.nodeid for item in same} - kept
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def _varied(items: list[pytest.Function], count: int) -> list[pytest.Function]:
    """Return parameter sets that together have as many pairs of values as possible; a hash decides ties."""
    left = sorted(items, key=lambda item: crc32(item.nodeid.encode()))
    kept: list[pytest.Function] = []
    seen: set[frozenset[tuple[str, int]]] = set()
    while left and len(kept) < count:
        best = max(left, key=lambda item: len(_pairs(item) - seen))
        left.remove(best)
        kept.append(best)
        seen |= _pairs(best)
    return kept


def _pairs(item: pytest.Function) -> set[frozenset[tuple[str, int]]]:
    values = [(name, id(value)) for name, value in item.callspec.params.items()]
    return {frozenset((one, other)) for one in values for other in values}
