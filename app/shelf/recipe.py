"""The plain values that make an engine, also in a process of its own."""

from dataclasses import dataclass

from neo_desktop.engine.engine import Engine
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.progress import Progress


@dataclass(frozen=True, slots=True)
class EngineRecipe:
    """An `EngineMaker`."""

    name: str  # as the API calls the model
    options: EngineOptions

    def __call__(self, progress: Progress) -> Engine:
        """Load the model; raises what the engine raises."""
        engine = Engine.from_options(self.options, progress=progress)
        engine.model_name = self.name  # of a folder in the hub's cache, the engine knows a hash only
        return engine
