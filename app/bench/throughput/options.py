"""What is asked of the engine, how often, and under which policies."""

from dataclasses import dataclass
from pathlib import Path

from neo_desktop.app.bench.throughput.llama_cpp.library import check_installed
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.placement import get_policy

# Tokens in and out of a synthetic request, unless they are given. On a GPU as in summaries, the case that NEO
# was made for (its section 5.1); a CPU alone takes a second for a hundred tokens of a prompt.
LENGTHS = {"cuda": (400, 50), "cpu": (100, 30)}


@dataclass(frozen=True, slots=True)
class ThroughputOptions(EngineOptions):
    """Model, requests and policies.

    Raises ValueError for a policy that does not exist, for numbers that make no sense and for a missing
    llama.cpp.
    """

    trace: Path | None = None  # an Azure CSV or a JSON list of lengths; None: synthetic lengths
    input_tokens: int | None = None  # of synthetic requests, within 0.9 to 1.1 of it; None: see LENGTHS
    output_tokens: int | None = None  # likewise
    num_requests: int | None = None  # None: so many that all runs together take about `seconds`
    seed: int = 0
    repeats: int = 3
    policies: tuple[str, ...] | None = None  # None: those that differ on this machine
    seconds: float = 60.0  # for all runs together, if the number of requests is free
    llama_cpp: bool = False  # also measure llama.cpp with the same weights

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        for name in ("input_tokens", "output_tokens", "num_requests", "repeats"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected 1 or more")
        if self.seconds <= 0:
            raise ValueError(f"seconds is {self.seconds}; expected more than 0")
        for policy in self.policies or ():
            get_policy(policy)
        if self.llama_cpp:
            check_installed()
