"""Environment, hypothesis profiles and fixtures that all tests share."""

import gc
import logging
import os
import signal
import ssl
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
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
from neo_desktop.models.traced import graph
from neo_desktop.models.traced.sizes import Source

_IS_QUICK = sys.platform == "linux" and not torch.cuda.is_available()  # CUDA cannot start in a forked process

# Must be set before Triton is imported: without a GPU, kernels run in its interpreter, on CPU tensors.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Shells make background jobs ignore Ctrl-C; processes started by tests must react to it all the same.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _surroundings() -> Iterator[None]:
    """Measure this computer briefly, outside the user's cache, and start child processes quickly.

    Torch logs endlessly about an export to any listening handler.
    """
    for name in ("torch", "torch.__trace"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        quick_processes() if _IS_QUICK else nullcontext(),
    ):
        profile_briefly()
        patch.setenv("NEO_DESKTOP_CACHE", folder)
        patch.setattr(setup, "MOST_DISK_BYTES", 0)  # tests share models: none may find another one's KV
        patch.setenv("NEO_DESKTOP_DOCTOR", "off")  # child processes lack an imitated GPU
        yield


@pytest.fixture(scope="session", autouse=True)
def _certificates_once() -> Iterator[None]:
    """Read the authorities' certificates once: each HTTP client would take 0.04 s to do so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def _exported_once() -> Iterator[None]:
    """Export each configuration once, which takes 2 s: tests have it in many folders.

    Torch's cache of operators' results serves later layers. It costs models of two layers a quarter more.
    """
    export, exports = graph._exported.__wrapped__, dict[object, graph.Exported]()

    def exported(source: Source, modified_ns: int, *others: Any) -> graph.Exported:
        content = source.named.read_text() if source.config_json is None else source.config_json
        key = replace(source, path=Path(), config_json=content), *others
        if key not in exports:
            with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
                exports[key] = export(source, modified_ns, *others)
        return exports[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "_exported", exported)
        yield


@pytest.fixture(autouse=True)
def levels() -> Iterator[Levels]:
    """Setter of the process's fallback levels; every test restores them."""
    with restored_fallbacks() as levels:
        yield levels


@pytest.fixture(scope="module", autouse=True)
def _lasting() -> Iterator[None]:
    """Let the collector pass over what a module leaves: modules and caches, which last."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pytest_collection_finish() -> None:
    """Let the collector, which every engine calls as it ends, pass over what was imported: 1 s each time."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Start workers quickly; without --all, let hypothesis try few inputs, on computers of any speed."""
    if _IS_QUICK and config.getoption("numprocesses", None):
        workers = ExitStack()
        workers.enter_context(quick_processes(list(map(str, config.invocation_params.args))))
        config.add_cleanup(workers.close)
    settings.register_profile(
        "any pace",
        max_examples=100 if config.getoption("--all") else 15,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        derandomize=os.environ.get("CI") == "true",  # CI tries the same inputs each time
    )
    settings.load_profile("any pace")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every parameter set of tests marked `sample`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --all, keep `sample(n)` parameter sets, and all pairs of values of other products."""
    if config.getoption("--all"):
        return
    sets: dict[tuple[str, int | None], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function):
            count = min((mark.args[0] for mark in item.iter_markers("sample")), default=None)
            sets.setdefault((item.nodeid.partition("[")[0], count), []).append(item)
    left_out = set()
    for (_, count), same in sets.items():
        if count is not None or len(_axes(same[0])) > 2:
            left_out |= set(same) - set(_varied(same, len(same) if count is None else count))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _varied(items: list[pytest.Function], count: int) -> list[pytest.Function]:
    """Return at most `count` sets with as many pairs of values as possible; a hash decides ties."""
    left = {item: _pairs(item) for item in sorted(items, key=lambda item: crc32(item.nodeid.encode()))}
    kept: list[pytest.Function] = []
    while len(kept) < count and left:
        best = max(left, key=lambda item: len(left[item]))
        found = left.pop(best)
        if not found and kept:
            break
        kept.append(best)
        for pairs in left.values():
            pairs.difference_update(found)
    return kept


def _axes(item: pytest.Function) -> dict[str, int]:
    """Return the identity of the item's value in each parametrisation, by its first name."""
    axes = (
        {name: id(value) for name, value in item.callspec.params.items()} if hasattr(item, "callspec") else {}
    )
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        first, *others = (name.strip() for name in names)
        axes[first] = hash((axes[first], *(axes.pop(name) for name in others)))
    return axes


def _pairs(item: pytest.Function) -> set[frozenset[tuple[str, int]]]:
    values = list(_axes(item).items())
    return {frozenset((one, other)) for one in values for other in values}
