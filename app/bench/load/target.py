"""What can be put under load: anything that streams the answer to a prompt. And what became of a request."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import StrEnum
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

        Raises TargetError if the answer, or its rest, will not come.
        """

    def stats(self) -> EngineStats | None:
        """Return the engine's counters; None for a server that keeps them to itself."""

    async def close(self) -> None:
        """End all requests and free everything."""


class Outcome(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    REFUSED = "refused"  # not taken: too many wait already, or it does not fit
    FAILED = "failed"  # taken, or perhaps taken, and not answered to its end
    UNFINISHED = "unfinished"  # given up by the client when its time was over


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must keep to count for goodput."""

    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request's life, in milliseconds of one clock.

    A chunk is a part of the answer that came at once: one token, or several.
    """

    arrival_ms: float  # when it was due to be sent
    sent_ms: float  # when the client got to sending it
    end_ms: float  # when the answer was complete, or the client learnt that it will not be
    chunks_ms: tuple[float, ...]  # when each chunk came; a finished request has one at least
    prompt_tokens: int  # as the server counted them
    cached_tokens: int  # of the prompt, not computed but reused
    output_tokens: int
    outcome: Outcome
    reason: str = ""  # of a failure: short, and the same for all of its kind
    message: str = ""  # of a failure: in full

    @property
    def is_finished(self) -> bool:
        """Whether it was answered to the end."""
        return self.outcome is Outcome.FINISHED

    @property
    def client_lag_ms(self) -> float:
        """How late the client was."""
        return self.sent_ms - self.arrival_ms

    # The rest is for finished requests only.

    @property
    def ttft_ms(self) -> float:
        """Time to first token: from the moment it was due to the first chunk, waiting included."""
        return self.chunks_ms[0] - self.arrival_ms

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first: first chunk to end over tokens - 1; None for one token."""
        gaps = self.output_tokens - 1
        return (self.end_ms - self.chunks_ms[0]) / gaps if gaps > 0 else None

    @property
    def itl_ms(self) -> list[float]:
        """Inter-token latencies: the gaps between successive chunks."""
        return [later - earlier for earlier, later in zip(self.chunks_ms, self.chunks_ms[1:], strict=False)]

    @property
    def end_to_end_ms(self) -> float:
        """From the moment it was due to the end of its answer."""
        return self.end_ms - self.arrival_ms

    @property
    def per_token_ms(self) -> float:
        """Its whole time divided by its output tokens: the normalised latency of NEO's figure 6."""
        return self.end_to_end_ms / self.output_tokens

    def is_good(self, limits: Limits) -> bool:
        """Whether it was finished within both limits; an answer of one token has no TPOT to be too long."""
        return self.is_finished and self.ttft_ms <= limits.ttft_ms and (self.tpot_ms or 0.0) <= limits.tpot_ms
