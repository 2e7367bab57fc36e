"""Parameter sets of tests: a few in each run, more with --all."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import pytest
from hypothesis import settings

few_examples = settings(max_examples=settings().max_examples // 3)  # of slow properties


def seeds(few: int, every: int) -> list[Any]:
    """Return the seeds from 0; those from `few` on run with --all."""
    return first(range(every), few)


def first(values: Iterable[Any], few: int = 1) -> list[Any]:
    """Return all values; those from `few` on run with --all. Tests of a model's export share the first."""
    rest = iter(values)
    return [*islice(rest, few), *(pytest.param(value, marks=pytest.mark.sample(0)) for value in rest)]
