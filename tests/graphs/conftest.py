"""The imitated GPU as a fixture."""

from collections.abc import Iterator

import pytest
from imitated_device import ImitatedDevice, imitated_device


@pytest.fixture
def imitated() -> Iterator[ImitatedDevice]:
    """The imitated GPU, whole again after the test. For tests that are marked `needs_imitated_gpu`."""
    device = imitated_device()
    assert device is not None
    device.recover()
    yield device
    device.recover()
