"""What can be put under load: anything that streams the answer to a prompt."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from neo_desktop.engine.stats import EngineStats

Prompt = str | Sequence[int]


class TargetError(RuntimeError):
    """A request that was not answered; without a request, a target that cannot be used.

    Args:
        message: what went wrong and what to do.
        reason: short, and the same for all requests that end for it; None: the message.
        is_refusal: the target did not take the request.
    """

    def __init__(self, message: str, reason: str | None = None, *, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.reason = reason or message
        self.is_refusal = is_refusal


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens a request had in the end, as counted by the target."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0  # of the prompt, reused from earlier requests


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of an answer that has just come; the last one holds the usage and no part of the answer."""

    usage: Usage | None = None


class Target(Protocol):
    """A running engine or server. All of it belongs to one event loop."""

    @property
    def model(self) -> str:
        """The model's name."""

    @property
    def notes(self) -> Sequence[str]:
        """What a reader of the figures should know, as found out so far."""

    async def start(self) -> None:
        """Get ready for requests; raises TargetError where that is impossible."""

    def make_prompt(self, tokens: int) -> Prompt:
        """Return a prompt of about this many tokens that shares no beginning with any other."""

    def stream(self, prompt: Prompt, max_tokens: int) -> AsyncGenerator[Chunk]:
        """Yield the answer's parts as they come, then its usage; leaving it early ends the request.

        Raises:
            TargetError: the answer, or its rest, will not come.
        """

    def stats(self) -> EngineStats | None:
        """Return the engine's counters; None for a server that keeps them to itself."""

    async def close(self) -> None:
        """End all requests and free everything."""
