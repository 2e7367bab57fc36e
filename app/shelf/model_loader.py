"""From a model's name to a service, with the settings of the command line, which hold for every model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from neo_desktop.app.commands.model_options import ModelOptions
from neo_desktop.app.service import EngineService
from neo_desktop.app.shelf.catalogue import Catalogue, LocalModel
from neo_desktop.app.shelf.fits import Fit, fit
from neo_desktop.app.shelf.hosting import LoadProgress
from neo_desktop.app.shelf.speed import Figures, find_figures
from neo_desktop.engine.cuda.streams import open_streams
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.loading import choose_device, choose_dtype
from neo_desktop.engine.profiling.budget import FreeMemory
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.tokenizer import Tokenizer

WEIGHTS_SHARE = 0.5  # of the progress; the rest is for measuring, which only the first start needs


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What holds for every model that is loaded."""

    options: ModelOptions  # which model they name does not matter
    policy: str = "auto"
    trace_timeline: Path | None = None


class ModelLoader:
    """Makes services, for a `ModelHost`; one at a time.

    Args:
        catalogue: where names are looked up.
        settings: of all engines.
        make_service: of an engine.
        reports: folder of the self-test's reports, whose figures predictions are made from.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        settings: EngineSettings,
        make_service: Callable[[Engine], EngineService] = EngineService,
        reports: Path | None = None,
    ) -> None:
        self.catalogue = catalogue
        self.settings = settings
        self._make_service = make_service
        self._reports = reports
        self.note: str | None = None  # what the owner of the computer should know of the loaded model
        self._before_bytes: int | None = None  # what this process had before the model was loaded

    def __call__(self, name: str, progress: LoadProgress) -> EngineService:
        """Load a model; see `Loader`. Raises what the engine raises, and UnknownModelError."""
        model = self.catalogue.get(name)
        self.figures()  # now, while nothing else runs
        self._before_bytes = psutil.Process().memory_info().rss
        options = self.settings.options

        def loaded(done_bytes: int, total_bytes: int) -> None:
            progress(WEIGHTS_SHARE * done_bytes / max(total_bytes, 1), "Loading weights")

        def measured(share: float, what: str) -> None:
            progress(WEIGHTS_SHARE + (1 - WEIGHTS_SHARE) * share, f"Measuring this computer: {what}")

        progress(0.0, "Loading weights")
        engine = Engine.from_pretrained(
            model.source,
            shape=model.shape,
            device=options.device,
            dtype=options.dtype,
            policy=self.settings.policy,
            gpu_cache_tokens=options.gpu_cache_tokens,
            cpu_cache_tokens=options.cpu_cache_tokens,
            gpu_slice=options.gpu_slice,
            gpu_memory_gib=options.gpu_memory_gib,
            cpu_memory_gib=options.cpu_memory_gib,
            cpu_cache_dtype=options.cpu_cache_dtype,
            trace_timeline=self.settings.trace_timeline,
            progress=loaded,
            profile_progress=measured,
        )
        self.note = engine.streams.note
        engine.model_name = name  # of a folder in the hub's cache, the engine knows a hash only
        return self._make_service(engine)

    def check(self, model: LocalModel) -> None:
        """Check what can be known without taking memory; raises what loading the model would raise."""
        options = self.settings.options
        device = choose_device(options.device)
        open_streams(device, options.gpu_slice)
        config = model.summary.config
        if config is None:  # the loader's own words
            config = ModelConfig.from_pretrained(model.summary.path)
        choose_dtype(options.dtype, config, device)
        if model.shape is None:
            Tokenizer.from_pretrained(model.summary.path)

    def why_not(self, model: LocalModel) -> str | None:
        """Return why loading a model would fail, as far as it can be known; None: it would not."""
        try:
            self.check(model)
        except (ValueError, RuntimeError, OSError) as error:
            return str(error)
        return None

    def fit(self, config: ModelConfig, *, is_loaded: bool) -> Fit:
        """Tell what loading a model would bring in place of the one that may be loaded."""
        free = self._free(is_loaded)
        return fit(config, self.settings.options, self.settings.policy, free, self.figures())

    def figures(self) -> Figures | str:
        """Return what is known of this computer's speed, or why nothing is."""
        return find_figures(choose_device(self.settings.options.device), self._reports)

    def _free(self, is_loaded: bool) -> FreeMemory:
        device = choose_device(self.settings.options.device)
        now = FreeMemory.now(device)
        gpu = None if now.gpu_bytes is None else now.gpu_bytes + torch.cuda.memory_reserved(device)
        held = 0
        if is_loaded and self._before_bytes is not None:
            held = max(psutil.Process().memory_info().rss - self._before_bytes, 0)
        return FreeMemory(now.host_bytes + held, gpu)
