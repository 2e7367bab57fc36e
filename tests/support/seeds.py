"""Seeds of random tests: a few in each run, more with --all."""

from typing import Any

import pytest


def seeds(few: int, every: int) -> list[Any]:
    """Return the seeds from 0; those from `few` on run with --all."""
    return [*range(few), *(pytest.param(seed, marks=pytest.mark.sample(0)) for seed in range(few, every))]
