"""The calls of a service to an engine, all from one thread, except `grammars.compile` and `vision.see`."""

from collections.abc import Callable, Sequence
from typing import Protocol

from neo_desktop.engine.grammar import GrammarCompiler
from neo_desktop.engine.input_processor import InputProcessor, PreparedRequest
from neo_desktop.engine.live import LiveView
from neo_desktop.engine.request import RequestOutput
from neo_desktop.engine.stats import EngineStats
from neo_desktop.models.config import GenerationDefaults
from neo_desktop.models.vision.tower import Vision


class ServedEngine(Protocol):
    """`Engine` is one, and `LlamaCppEngine`."""

    model_name: str
    input_processor: InputProcessor
    grammars: GrammarCompiler
    blindness: str  # the sentence that refuses images; empty: `vision` reads them
    vision: Vision | None

    @property
    def sampling_defaults(self) -> GenerationDefaults:
        """The recommendation of the model's makers."""

    @property
    def note(self) -> str | None:
        """A note for the owner of the computer."""

    @property
    def gpu_bytes(self) -> int:
        """The GPU memory that it took."""

    @property
    def has_work(self) -> bool:
        """True while requests are unfinished."""

    def add(self, request_id: str, prepared: PreparedRequest) -> None:
        """Queue a request."""

    def abort(self, request_id: str) -> object:
        """End a request now."""

    def collect(self) -> None:
        """End the iteration under way, or else carry out one."""

    def launch(self) -> None:
        """Start the next one, if it works beside its caller."""

    def take_outputs(self) -> Sequence[RequestOutput]:
        """Return what requests gained since the last call."""

    def watch(self, alarm: Callable[[], object]) -> None:
        """Register a function that any thread calls when `check` would raise while the engine is idle."""

    def check(self) -> None:
        """Raise the known reason why the engine cannot compute any more."""

    def rest(self) -> bool:
        """Do occasional work of an idle engine; return True if figures have changed."""

    def stats(self) -> EngineStats:
        """Return how it stands."""

    def live_view(self) -> LiveView:
        """Return what it does right now, for people."""

    def close(self) -> None:
        """Drop weights and caches."""
