"""What an engine is made from: plain values, so that it can be made in a process of its own."""

from dataclasses import dataclass
from pathlib import Path

from neo_desktop.app.commands.model_options import ModelOptions
from neo_desktop.app.engines.messages import LoadProgress
from neo_desktop.engine.engine import Engine

WEIGHTS_SHARE = 0.5  # of the progress; the rest is for measuring, which only the first start needs


@dataclass(frozen=True, slots=True)
class EngineRecipe:
    """An `EngineMaker`.

    Args:
        name: as the API calls the model.
        source: where its checkpoint is, see `Engine.from_pretrained`.
        shape: likewise.
        options: which model they name does not matter.
        policy: as for the engine.
        trace_timeline: likewise.
    """

    name: str
    source: str | Path
    shape: str | None
    options: ModelOptions
    policy: str
    trace_timeline: Path | None

    def __call__(self, progress: LoadProgress) -> Engine:
        """Load the model; raises what the engine raises."""

        def loaded(done_bytes: int, total_bytes: int) -> None:
            progress(WEIGHTS_SHARE * done_bytes / max(total_bytes, 1), "Loading weights")

        def measured(share: float, what: str) -> None:
            progress(WEIGHTS_SHARE + (1 - WEIGHTS_SHARE) * share, f"Measuring this computer: {what}")

        progress(0.0, "Loading weights")
        options = self.options
        engine = Engine.from_pretrained(
            self.source,
            shape=self.shape,
            device=options.device,
            dtype=options.dtype,
            policy=self.policy,
            gpu_cache_tokens=options.gpu_cache_tokens,
            cpu_cache_tokens=options.cpu_cache_tokens,
            gpu_slice=options.gpu_slice,
            gpu_memory_gib=options.gpu_memory_gib,
            cpu_memory_gib=options.cpu_memory_gib,
            cpu_cache_dtype=options.cpu_cache_dtype,
            trace_timeline=self.trace_timeline,
            progress=loaded,
            profile_progress=measured,
        )
        engine.model_name = self.name  # of a folder in the hub's cache, the engine knows a hash only
        return engine
