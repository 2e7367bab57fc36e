"""An engine behind a service: its calls, the commands to it and its events.

Commands and events are plain values, since they may cross to another process. Commands that want an answer
carry a ticket, and exactly one `Answered` with that ticket comes back, unless the engine ends.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

from neo_desktop.engine.grammar import GrammarCompiler
from neo_desktop.engine.input_processor import InputProcessor, PreparedRequest
from neo_desktop.engine.live import LiveView
from neo_desktop.engine.progress import Progress
from neo_desktop.engine.request import RequestOutput
from neo_desktop.engine.stats import EngineStats
from neo_desktop.models.config import GenerationDefaults
from neo_desktop.models.vision.prompt import SeenImage
from neo_desktop.models.vision.tower import Vision


class ServedEngine(Protocol):
    """`Engine` is one, and `LlamaCppEngine`. One thread makes the calls.

    Exceptions are `grammars.compile` and `vision.see`.
    """

    model_name: str
    input_processor: InputProcessor
    grammars: GrammarCompiler
    blindness: str  # the sentence that refuses images; empty: `vision` reads them
    vision: Vision | None

    @property
    def sampling_defaults(self) -> GenerationDefaults: ...

    @property
    def note(self) -> str | None:
        """A note for the owner of the computer."""

    @property
    def gpu_bytes(self) -> int:
        """The GPU memory that it took."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request_id: str, prepared: PreparedRequest) -> None: ...

    def abort(self, request_id: str) -> object: ...

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

    def stats(self) -> EngineStats: ...

    def live_view(self) -> LiveView: ...

    def close(self) -> None: ...


EngineMaker = Callable[[Progress], ServedEngine]  # for a process it must be something that can be pickled


@dataclass(frozen=True, slots=True)
class Add:
    """Queue prompts, which have been checked."""

    request_ids: Sequence[str]
    prepared: Sequence[PreparedRequest]


@dataclass(frozen=True, slots=True)
class Compile:
    """Make a grammar ready, in a thread beside the engine, which then finds it ready."""

    ticket: int
    grammar: str


@dataclass(frozen=True, slots=True)
class See:
    """Read an image file, in a thread beside the engine: the answer's value is a SeenImage."""

    ticket: int
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Look:
    """Report the engine's present work: the answer's value is a LiveView."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


class Check:
    """Check the engine after its alarm."""


class Stop:
    """End the loop."""


Command = Add | Check | Compile | See | Look | Abort | Stop


@dataclass(frozen=True, slots=True)
class Answered:
    ticket: int
    value: LiveView | SeenImage | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Gained:
    """Tokens that requests gained, and the engine's figures."""

    outputs: Sequence[RequestOutput]
    stats: EngineStats
    seconds: float | None = None  # of the iteration; None: commands were carried out


class EngineCrashError(RuntimeError):
    """A signal of its own code ended the engine's process, at a stage of loading."""

    def __init__(self, reason: str, signal: str, stage: str) -> None:
        super().__init__(reason)
        self.signal = signal
        self.stage = stage


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event."""

    reason: str | None = None  # a sentence without its full stop; None: the engine was told to stop
    signal: str | None = None  # of its own code, that ended its process


Event = Answered | Gained | Ended
Receiver = Callable[[Sequence[Event]], object]  # called by a thread of the engine's


@dataclass(frozen=True, slots=True)
class Progressed:
    share: float
    what: str


@dataclass(frozen=True, slots=True)
class EngineFacts:
    stats: EngineStats  # at the beginning
    model_name: str
    input_processor: InputProcessor
    sampling_defaults: GenerationDefaults
    note: str | None
    gpu_bytes: int
    blindness: str

    @classmethod
    def of(cls, engine: ServedEngine) -> "EngineFacts":
        return cls(engine.stats(), *(getattr(engine, one.name) for one in fields(cls)[1:]))


def portable(error: Exception) -> Exception:
    """Return an error that can be pickled: itself, or its name and text."""
    bare = error.with_traceback(None)
    try:
        if type(pickle.loads(pickle.dumps(bare))) is type(bare):
            return bare
    except Exception:  # its constructor may want anything
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")
