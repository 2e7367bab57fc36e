"""The environment of the checks: the model's shape, its device, and fallback levels."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from neo_desktop.engine.doctor.outcome import CheckError, Figure, Figures
from neo_desktop.engine.doctor.trials import Subject
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.loading import choose_device, choose_dtype, open_model
from neo_desktop.models.config import ModelConfig
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
        """Device of the model."""
        return choose_device(self.subject.device)

    @cached_property
    def config(self) -> ModelConfig:
        """Shape of the model."""
        if self.subject.shape is not None:
            return published_shape(self.subject.shape)
        return open_model(self.subject.model).config()

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and KV."""
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

    def judge(self, errors: Sequence[float], work: Callable[[], object], nbytes: int) -> Figures:
        """Return the figures of a kernel.

        Args:
            errors: relative errors of its outputs.
            work: calls it; it has run before.
            nbytes: read and written by a call.

        Raises:
            CheckError: rounding does not explain an error.
        """
        figures: dict[str, Figure] = {}
        worst = float(torch.tensor(errors, dtype=torch.float64).max())  # nan if any is nan
        require(worst, BOUNDS[self.dtype], figures)
        return {**figures, "ms": self.milliseconds(work), "bytes": nbytes}

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


def require(error: float, bound: float, figures: dict[str, Figure]) -> None:
    """Record an error and its bound among the figures.

    Raises:
        CheckError: the error is above the bound, or not a number.
    """
    figures |= {"error": "nan" if math.isnan(error) else error, "bound": bound}
    if not error <= bound:
        raise CheckError(f"the relative error is {error:.1e}; rounding explains at most {bound:.1e}", figures)
