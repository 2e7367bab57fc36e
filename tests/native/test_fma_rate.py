"""The rate of multiply-adds, a reference for the speed of attention."""

import math

import pytest
import torch

from neo_desktop import native


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_instruction_set_has_a_rate(isa: str, dtype: torch.dtype) -> None:
    for num_threads in (0, 1, 3):
        rate = native.fma_rate(0.001, num_threads, isa, dtype)
        assert math.isfinite(rate)
        assert rate > 1e6


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"seconds": 0.0}, "seconds is 0.0"),
        ({"seconds": math.nan}, "seconds is"),
        ({"seconds": 11.0}, "up to 10"),
        ({"num_threads": -1}, "num_threads is -1"),
        ({"isa": "mmx"}, "isa 'mmx' is unknown"),
        ({"dtype": torch.float16}, "dtype must be float32 or bfloat16"),
        ({"dtype": torch.float64}, "dtype must be float32 or bfloat16"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        native.fma_rate(**arguments)  # type: ignore[arg-type]
