"""What the suite measures, and how much time it takes."""

from dataclasses import dataclass

from neo_desktop.engine.options import EngineOptions


@dataclass(frozen=True, slots=True)
class GpuOptions(EngineOptions):
    """The defaults are a thorough run.

    Raises ValueError for sizes and times that make no sense.
    """

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)  # requests that decode together
    context_tokens: int = 512  # of each prompt; decoding adds some
    iterations: int = 16  # per batch and round
    seconds: float = 60.0  # for all rounds; at least one is made
    seed: int = 0  # of the prompts

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        if not self.batches or list(self.batches) != sorted(set(self.batches)) or self.batches[0] < 1:
            raise ValueError(f"batches must be rising numbers from 1 on, got {self.batches}")
        for name, value in (("context_tokens", self.context_tokens), ("iterations", self.iterations)):
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        if not self.seconds > 0:
            raise ValueError(f"seconds is {self.seconds:g}; expected more than 0")

    @property
    def longest_tokens(self) -> int:
        """What the first request grows to: it is there in every batch of a round."""
        return self.context_tokens + len(self.batches) * (self.iterations + TRACED_ITERATIONS + 2) + 1


TRACED_ITERATIONS = 4  # per batch and round, with a timeline: recording costs a little
