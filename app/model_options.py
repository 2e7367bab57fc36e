"""Which model to measure, and how much memory it may take."""

from dataclasses import dataclass

from neo_desktop.engine.loading import Progress
from neo_desktop.engine.placement import Place
from neo_desktop.engine.profiling.budget import MemoryCaps
from neo_desktop.engine.setup import Setup, set_up


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """As in `Engine.from_pretrained`."""

    model: str = "builtin"
    shape: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    gpu_cache_tokens: int | None = None
    cpu_cache_tokens: int | None = None
    gpu_memory_gib: float | None = None
    cpu_memory_gib: float | None = None
    cpu_cache_dtype: str = "auto"

    def set_up(self, progress: Progress | None = None) -> Setup:
        """Load the model and take the memory for its KV in every place; raises what the engine raises."""
        return set_up(
            self.model,
            device=self.device,
            dtype=self.dtype,
            shape=self.shape,
            places=tuple(Place),
            cache_tokens={Place.DEVICE: self.gpu_cache_tokens, Place.HOST: self.cpu_cache_tokens},
            caps=MemoryCaps.from_gib(self.gpu_memory_gib, self.cpu_memory_gib),
            cpu_cache_dtype=self.cpu_cache_dtype,
            progress=progress,
        )
