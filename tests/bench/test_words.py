"""The self-test's texts, with their figures filled in."""

import pytest
from jinja2 import UndefinedError

from neo_desktop.app.bench.words import many, no_gpu, say


def test_lines_of_a_text_become_one_paragraph() -> None:
    figures = {"steady": True, "flops": (1.0, 1234.5), "reads": (30.0, 30.25), "count": 2}
    assert say("steadiness", **figures) == (
        "The computer was steady: the CPU did 1 to 1,234 GFLOP/s and read memory at 30.0 to 30.2 GB/s, at 2 "
        "times during the run.",
    )


def test_what_has_several_lines_stays_in_its_paragraph() -> None:
    said = say("default-model", name="a\n\nb", shapes=["c"], free_bytes=0, read_gb_per_s=1.0)
    assert len(said) == 1
    assert said[0].startswith("Measured with random weights in the shape of a")


def test_a_figure_that_is_missing_is_an_error_and_not_a_gap() -> None:
    with pytest.raises(UndefinedError):
        say("default-model", name="a")


def test_why_there_is_no_gpu_is_a_sentence() -> None:
    assert no_gpu("no NVIDIA driver: NVML Shared Library Not Found") == "No NVIDIA GPU was found"
    assert no_gpu("torch cannot use the GPU") == "Torch cannot use the GPU"
    assert no_gpu("") == "The CPU was asked for"
    assert [many(count, "thread") for count in (1, 2)] == ["1 thread", "2 threads"]
