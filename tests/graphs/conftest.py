"""Fixtures: the imitated GPU, and the fallback level of the kernels."""

from collections.abc import Iterator

import pytest
from fallback_levels import kernels_on
from imitated_device import ImitatedDevice, imitated_device


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run torch's kernels unless a test asks for others: Triton's interpreter is slow."""
    with kernels_on(getattr(request, "param", "torch")):
        yield


@pytest.fixture(params=[None] if imitated_device() is None else [0, 1, 2, 3, 8])
def any_queues(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run on the real GPU, or on the imitated one with any number of queues (0: drawn)."""
    device = imitated_device()
    if device is not None:
        device.set_queues(request.param, seed=request.param)
    yield
    if device is not None:
        device.recover()


@pytest.fixture
def imitated() -> Iterator[ImitatedDevice]:
    """The imitated GPU, recovered after the test. For tests marked `needs_imitated_gpu`."""
    device = imitated_device()
    assert device is not None
    device.recover()
    yield device
    device.recover()
