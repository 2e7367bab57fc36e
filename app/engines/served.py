"""What a service needs of an engine: few calls, all from one thread, `grammars.compile` excepted."""

from collections.abc import Callable, Sequence
from typing import Protocol

from neo_desktop.engine.grammar import GrammarCompiler
from neo_desktop.engine.input_processor import InputProcessor, PreparedRequest
from neo_desktop.engine.live import LiveView
from neo_desktop.engine.request import RequestOutput
from neo_desktop.engine.stats import EngineStats
from neo_desktop.models.config import GenerationDefaults


class ServedEngine(Protocol):
    """`Engine` is one, and `LlamaCppEngine`."""

    model_name: str
    input_processor: InputProcessor
    grammars: GrammarCompiler

    @property
    def sampling_defaults(self) -> GenerationDefaults:
        """What the model's makers recommend."""

    @property
    def note(self) -> str | None:
        """What the owner of the computer should know."""

    @property
    def gpu_bytes(self) -> int:
        """What it took of the GPU's memory."""

    @property
    def has_work(self) -> bool:
        """Whether another step would bring anything."""

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
        """Have something called, by any thread, when `check` would raise though nobody asks anything."""

    def check(self) -> None:
        """Raise why nothing can be computed any more, as far as it is known."""

    def rest(self) -> bool:
        """Do what is to be done now and then while there is no work; return whether figures have changed."""

    def stats(self) -> EngineStats:
        """Return how it stands."""

    def live_view(self) -> LiveView:
        """Return what it does right now, for people."""

    def close(self) -> None:
        """Drop weights and caches."""
