"""The environment of the checks: the model's shape, its device, and fallback levels."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from neo_desktop.engine.doctor.outcome import CheckError, Figures
from neo_desktop.engine.doctor.trials import Subject
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.loading import choose_device, choose_dtype, open_model
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.linear.grouped import Grouped
from neo_desktop.models.shapes import shape as published_shape

REPEATS = 5
# Relative error of an output vector, including rounding to the dtype.
BOUNDS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.int8: 2e-2}


@dataclass(frozen=True)
class Rig:
    """A subject's shape, device and dtype; it loads no weights.

    Raises:
        ValueError, ModelError: see `loading.load`.
    """

    subject: Subject

    @cached_property
    def device(self) -> torch.device:
        return choose_device(self.subject.device)

    @cached_property
    def config(self) -> ModelConfig:
        if self.subject.shape is not None:
            return published_shape(self.subject.shape)
        return open_model(self.subject.model).config()

    @cached_property
    def dtype(self) -> torch.dtype:
        return choose_dtype(self.subject.dtype, self.config, self.device)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding windows of the model's layers, and one that certainly masks something."""
        windows = {window for window in self.config.layer_windows if window is not None}
        return (None, *sorted(windows)[:1]) if windows else (None, 100)

    @property
    def sinks(self) -> Tensor | None:
        """Random sinks, [heads] on the CPU; None: the model has none."""
        heads = self.config.num_heads
        return torch.linspace(-2.0, 4.0, heads) if self.config.attention_sinks else None

    @property
    def query_size(self) -> float:
        """Magnitude of query elements, large enough that a softcap, if any, changes many scores."""
        return (self.config.attention_softcap or 2.0) / 2

    def one_layer(self) -> ModelConfig:
        """Return the shape with a single layer."""
        return replace(self.config, num_layers=1, layer_windows=(None,))

    def random(self, *shape: int) -> Tensor:
        """Return numbers of the model's dtype on the CPU, equal for equal shapes."""
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(shape, generator=generator).to(self.dtype)

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros of the model's dtype on the CPU."""
        return torch.zeros(shape, dtype=self.dtype)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def milliseconds(self, work: Callable[[], object]) -> float:
        """Return the shortest duration of a call; it has run before."""
        best = float("inf")
        for _ in range(REPEATS):
            self.synchronize()
            started = time.perf_counter()
            work()
            self.synchronize()
            best = min(best, time.perf_counter() - started)
        return round(1e3 * best, 4)


class Comparison:
    """Relative errors of a kernel's outputs, and its time."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._errors: list[float] = []
        self.work: Callable[[], object] | None = None  # the last call, for its time

    @property
    def worst(self) -> float:
        """The largest error; nan if any is nan."""
        return float(torch.tensor([0.0, *self._errors], dtype=torch.float64).max())

    def run(
        self,
        kernel: Callable[..., object],
        reference: Callable[..., object],
        arguments: Sequence[Any],
        outputs: Sequence[int],
        scratch: int | None = None,
    ) -> list[Any]:
        """Call a kernel on the device, and its reference on the CPU in float32; note the errors of outputs.

        Args:
            arguments: of both; copies are passed, because outputs are written in place.
            outputs: their positions among the arguments.
            scratch: position of an output whose last row is undefined.

        Returns:
            The kernel's arguments.
        """
        there = [_copied(each, self._rig.device) for each in arguments]
        here = [_copied(each, torch.device("cpu"), torch.float32) for each in arguments]
        self.work = lambda: kernel(*there)
        self.work()
        reference(*here)
        for position in outputs:
            rows = slice(-1) if position == scratch else slice(None)
            self.note(there[position][rows].cpu(), here[position][rows])
        return there

    def note(self, actual: Tensor, expected: Tensor) -> None:
        self._errors.append(error_of(actual, expected.double()))

    def figures(self, nbytes: int) -> Figures:
        """Return the figures of a kernel that reads and writes `nbytes` in its last call.

        Raises:
            CheckError: rounding does not explain an error.
        """
        assert self.work is not None
        figures = require(self.worst, BOUNDS[self._rig.dtype], {})
        return {**figures, "ms": self._rig.milliseconds(self.work), "bytes": nbytes}


def error_of(actual: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of a vector along the last dimension."""
    wrong = (actual.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    return float(wrong.max())


def _copied(value: Any, device: torch.device, floats: torch.dtype | None = None) -> Any:
    """Return a copy on a device, of tensors in any structure, with floats in this dtype if given."""
    if isinstance(value, Tensor):
        dtype = floats if floats is not None and value.is_floating_point() else value.dtype
        return value.to(device, dtype, copy=True)
    if isinstance(value, Grouped):
        return value.to(device)
    if isinstance(value, list):
        return [_copied(each, device, floats) for each in value]
    if isinstance(value, tuple):  # a named tuple
        return type(value)(*(_copied(each, device, floats) for each in value))
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(*(_copied(getattr(value, f.name), device, floats) for f in fields(value)))
    return value


@contextmanager
def on_levels(levels: Mapping[str, str]) -> Iterator[None]:
    """Use these fallback levels within the block.

    Raises:
        CheckError: the process fell back from one of the levels meanwhile.
    """
    with fallbacks.at_levels(levels):
        yield
        for standing in fallbacks.states():
            wanted = levels.get(standing.mechanism.name)
            if wanted is not None and standing.level.name != wanted:
                raise CheckError(standing.reason or "a fallback replaced it")


def require(error: float, bound: float, figures: Figures) -> Figures:
    """Return the figures with an error and its bound.

    Raises:
        CheckError: the error is above the bound, or not a number.
    """
    figures = {**figures, "error": "nan" if math.isnan(error) else error, "bound": bound}
    if not error <= bound:
        raise CheckError(f"the relative error is {error:.1e}; rounding explains at most {bound:.1e}", figures)
    return figures
