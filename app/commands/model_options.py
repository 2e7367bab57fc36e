"""Which model to measure, and how much memory it may take."""

from collections.abc import Sequence
from dataclasses import dataclass

from neo_desktop.engine.loading import LoadedModel, Progress, choose_cpu_cache_dtype, load
from neo_desktop.engine.placement import PLACES, Place
from neo_desktop.engine.profiling.budget import MemoryCaps
from neo_desktop.engine.setup import Setup, take_memory


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
    gpu_slice: int | None = None

    def load(self, progress: Progress | None = None) -> LoadedModel:
        """Load the model; raises what the engine raises."""
        return load(
            self.model,
            device=self.device,
            dtype=self.dtype,
            shape=self.shape,
            gpu_slice=self.gpu_slice,
            caps=self.caps,
            progress=progress,
        )

    def take_memory(self, model: LoadedModel, places: Sequence[Place] = PLACES) -> Setup:
        """Take the memory for the KV of a loaded model in some places; raises what the engine raises."""
        return take_memory(
            model,
            places=places,
            cache_tokens=self.cache_tokens,
            caps=self.caps,
            cpu_cache_dtype=choose_cpu_cache_dtype(self.cpu_cache_dtype),
        )

    def set_up(self, progress: Progress | None = None) -> Setup:
        """Load the model and take the memory for its KV in every place."""
        return self.take_memory(self.load(progress))

    @property
    def cache_tokens(self) -> dict[Place, int | None]:
        """`place -> tokens asked for`; None: what fits."""
        return {Place.DEVICE: self.gpu_cache_tokens, Place.HOST: self.cpu_cache_tokens}

    @property
    def caps(self) -> MemoryCaps:
        """The most memory to take."""
        return MemoryCaps.from_gib(self.gpu_memory_gib, self.cpu_memory_gib)
