"""From a model's name to a service, with the settings of the command line, which hold for every model."""

import contextlib
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch

from neo_desktop.app.engines.loop import EngineThread
from neo_desktop.app.engines.messages import EngineMaker
from neo_desktop.app.engines.process import EngineProcess
from neo_desktop.app.engines.service import EngineLink, EngineService
from neo_desktop.app.llamacpp.choice import check_llamacpp, is_installed
from neo_desktop.app.llamacpp.recipe import LlamaCppRecipe, load_llamacpp
from neo_desktop.app.shelf.catalogue import Catalogue
from neo_desktop.app.shelf.checkpoint_summary import LocalModel, summarize
from neo_desktop.app.shelf.fits import Fit, Fitting
from neo_desktop.app.shelf.speed import MachineFigures, find_figures
from neo_desktop.engine.cuda.streams import open_streams
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.execute.ranks.driver import check_gpus
from neo_desktop.engine.loading import asked_dtype, choose_device, choose_dtype, model_path
from neo_desktop.engine.mtp import Layer, drafting_of
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.profiling.budget import FreeMemory
from neo_desktop.engine.profiling.hardware import driver_free_bytes, host_memory
from neo_desktop.engine.progress import Progress
from neo_desktop.engine.stats import LLAMACPP
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.rank import Rank
from neo_desktop.models.ranks import config_of_rank
from neo_desktop.models.registry import assistant_folder


@dataclass(frozen=True, slots=True)
class EngineRecipe:
    """The plain values that make an engine, also in a process of its own: an `EngineMaker`."""

    name: str  # as the API calls the model
    options: EngineOptions

    def __call__(self, progress: Progress) -> Engine:
        engine = Engine.from_options(self.options, progress=progress)
        engine.model_name = self.name  # of a folder in the hub's cache, the engine knows a hash only
        return engine


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model on this computer, and what it would bring in place of the loaded one."""

    model: LocalModel
    fit: Fit | None  # None: unknown
    reason: str | None  # obstacle; None: it runs if it fits
    runs_llamacpp: bool

    @property
    def refusal(self) -> str | None:
        """Why it cannot be run, or does not fit; None: it can be loaded."""
        return self.reason if self.reason or self.fit is None else self.fit.reason

    def to_json(self) -> dict[str, Any]:
        """Return its entry in lists for programs."""
        names = (
            *("name", "size_bytes", "dtype", "is_quantised", "architecture"),
            *("is_by_transformers", "parameters", "context_tokens"),
        )
        return {name: getattr(self.model, name) for name in names} | {
            "path": None if self.model.shape is not None else str(self.model.path),
            "runnable": self.refusal is None,
            "reason": self.refusal,
            "fit": None if self.fit is None else asdict(self.fit),
        }


class ModelLoader:
    """Makes services, for a `ModelHost`; one at a time.

    Args:
        options: for every engine; the model that they name does not matter.
        process: whether engines have processes of their own; None: on a GPU, divided ones, and llama.cpp.
        backend: "neo", "llamacpp", or "auto": llama.cpp where the engine has not what a model needs.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        options: EngineOptions,
        request_timeout_s: float | None = None,
        process: bool | None = None,
        backend: str = "auto",
    ) -> None:
        self.catalogue = catalogue
        self.options = options
        self._request_timeout_s = request_timeout_s
        self._wants_process = process
        self._backend = backend
        self.note: str | None = None  # for the owner of the computer, about the loaded model
        self._before_bytes: int | None = None  # of this process before the load
        self._device: torch.device | None = None  # the first choice of "auto"
        self._process: EngineProcess | None = None  # of the model that was loaded last

    def __call__(self, name: str, progress: Progress) -> EngineService:
        """Load a model; see `Loader`. Raises what the engine raises, and UnknownModelError."""
        model = self.catalogue.get(name)
        self.figures()  # now, while nothing else runs
        self._before_bytes = psutil.Process().memory_info().rss
        self._process = None
        make: EngineMaker
        if self.runs_llamacpp(model):
            make = LlamaCppRecipe(name, self._llamacpp_file(model), self._options_of(model))
            load = load_llamacpp
            has_process = self._wants_process is not False  # its end must not be this program's
        else:
            # A GPU that is lost later is an error, not a reason to use the CPU.
            device = self._device = self._chosen_device()
            make, load = EngineRecipe(name, self._own_options(model, device)), EngineProcess.load
            has_process = self.has_process
        link: EngineLink
        if has_process:
            link = self._process = load(make, progress)
        else:
            link = EngineThread(make(progress))
        self.note = link.facts.note
        return EngineService(link, self._request_timeout_s)

    def _own_options(self, model: LocalModel, device: torch.device) -> EngineOptions:
        return replace(
            self._options_of(model),
            model=model.source,
            shape=model.shape,
            device=device.type,
            draft_model=None if self._draft is None else self._draft.path,
        )

    def _options_of(self, model: LocalModel) -> EngineOptions:
        """Return the options without those that belong to the first model, if this is another."""
        return self.options if model.name == self.catalogue.first else replace(self.options, mmproj=None)

    @cached_property
    def _draft(self) -> LocalModel | None:
        """The draft model; UnknownModelError, or ModelError where it cannot be run."""
        name = self.options.draft_model
        if name is None:
            return None
        path = model_path(self.catalogue.source(str(name)))
        draft = summarize(path)
        if draft.config is None and assistant_folder(path) is None:
            raise ModelError(f"{name} cannot draft: {draft.reason or 'only llama.cpp can run it'}")
        return draft

    def _drafting(self, config: ModelConfig, layer: Layer | None) -> tuple[LocalModel | None, Layer | None]:
        """Return the draft model of a model, and its layer of multi-token prediction or its assistant.

        Loading the model would refuse the assistant of another one.
        """
        if self._draft is None:
            return None, layer
        assistant = assistant_folder(self._draft.path)
        if assistant is None:
            return self._draft, layer
        with contextlib.suppress(ModelError):
            return None, Layer.of_assistant(assistant, config)
        return None, None

    def runs_llamacpp(self, model: LocalModel) -> bool:
        return self._backend == LLAMACPP or (
            self._backend == "auto" and model.needs_llamacpp and is_installed()
        )

    def _llamacpp_file(self, model: LocalModel) -> Path:
        return check_llamacpp(model.path, self._options_of(model))

    @property
    def has_process(self) -> bool:
        if self._wants_process is not None:
            return self._wants_process
        # A divided one is lost with any of its parts, and started again as a whole.
        return self._chosen_device().type == "cuda" or self.options.tensor_parallel > 1

    def check(self, model: LocalModel) -> None:
        """Check what can be known without taking memory; raises what loading the model would raise."""
        options = self._options_of(model)
        if self.runs_llamacpp(model):
            self._llamacpp_file(model)
            return
        device = choose_device(options.device)
        if not self.has_process:  # a slice would take memory of the GPU here
            open_streams(device, options.gpu_slice)
        config = model.config
        if config is None:  # the loader's own words
            config = open_checkpoint(model.path, options.mmproj).config()
        config_of_rank(config, Rank(0, options.tensor_parallel))
        check_gpus(options.tensor_parallel, device)
        choose_dtype(asked_dtype(options), config, device)
        checkpoint = None if model.shape is not None else open_checkpoint(model.path, options.mmproj)
        if checkpoint is not None:
            checkpoint.tokenizer()
        if options.draft_model is not None or options.speculate == "mtp":
            drafting_of(self._own_options(model, device), checkpoint)

    def why_not(self, model: LocalModel) -> str | None:
        """Return why loading a model would fail, as far as it can be known; None: it would not."""
        try:
            self.check(model)
        except (ValueError, RuntimeError, OSError) as error:
            return str(error)
        return None

    def candidate(self, model: LocalModel, *, is_loaded: bool = False) -> Candidate:
        """Look at a model; `is_loaded`: in place of the one that is loaded."""
        runs_llamacpp = self.runs_llamacpp(model)
        if model.config is None or runs_llamacpp:
            return Candidate(model, None, model.reason or self.why_not(model), runs_llamacpp)
        try:
            found = self.fit(model.config, model.form, is_loaded=is_loaded, layer=model.layer)
        except (ValueError, RuntimeError) as error:  # a GPU without bfloat16, say
            return Candidate(model, None, str(error), runs_llamacpp)
        return Candidate(model, found, model.reason, runs_llamacpp)

    def fit(
        self,
        config: ModelConfig,
        stored: WeightFormat = DENSE,
        *,
        is_loaded: bool = False,
        layer: Layer | None = None,
    ) -> Fit:
        """Predict a model in place of the one that may be loaded."""
        free, figures = self._free(is_loaded), self.figures()
        return Fitting(config, self.options, free, figures, stored, *self._drafting(config, layer)).fit()

    def figures(self) -> MachineFigures | str:
        return find_figures(choose_device(self.options.device))

    def _chosen_device(self) -> torch.device:
        return self._device or choose_device(self.options.device)

    def _free(self, is_loaded: bool) -> FreeMemory:
        device = self._chosen_device()
        if device.type == "cuda" and self.has_process:
            # To ask CUDA would take memory of the GPU for good, and end with a GPU that is lost.
            now = FreeMemory(host_memory().available_bytes, driver_free_bytes(device))
        else:
            now = FreeMemory.now(device)
        host_held = gpu_held = 0
        if is_loaded and self._process is not None:
            gpu_held = self._process.facts.gpu_bytes
            with contextlib.suppress(psutil.Error):  # it has just ended
                process = psutil.Process(self._process.pid)
                parts = (process, *process.children(recursive=True))  # of a divided model
                host_held = sum(each.memory_info().rss for each in parts)
        elif is_loaded and self._before_bytes is not None:
            gpu_held = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
            host_held = max(psutil.Process().memory_info().rss - self._before_bytes, 0)
        gpu = None if now.gpu_bytes is None else now.gpu_bytes + gpu_held
        return FreeMemory(now.host_bytes + host_held, gpu)
