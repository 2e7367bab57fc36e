"""What the load suite is asked to do."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.placement import get_policy


@dataclass(frozen=True, slots=True)
class LoadOptions(EngineOptions):
    """Settings; with `url` a running server is measured and no engine is loaded.

    A run takes about `seconds` and a drain per rate, repeat and policy, and as much as two more of them per
    policy to find the capacity. For a quick run: `seconds=3, load_shares=(0.5, 0.75, 1.0)`.

    Raises:
        ValueError: a value is out of range, or two contradict each other.
    """

    trace: Path | None = None  # lengths from a file, see engine/simulation/workload.py
    input_tokens: int = 256  # without a trace: lengths uniform in 0.9 to 1.1 of these
    output_tokens: int = 64
    num_requests: int | None = None  # per rate; None: as many as come in `seconds`
    rates: tuple[float, ...] | None = None  # requests per second; None: `load_shares` of the capacity
    load_shares: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9, 1.1)
    seconds: float = 6.0  # in which the requests of a rate come
    drain_seconds: float | None = None  # for open requests at the end; None: see `suite.drain_seconds`
    repeats: int = 1  # each with other arrival times
    warm_up: int = 2  # requests sent first, and not counted
    seed: int = 0
    ttft_limit_ms: float = 2000.0  # what a request must keep to count for goodput
    tpot_limit_ms: float = 200.0
    policies: tuple[str, ...] | None = None  # None: see `suite.policies`
    url: str | None = None
    api_key: str | None = None
    url_model: str | None = None  # None: the first that the server lists

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        for name, least in (("input_tokens", 1), ("output_tokens", 1), ("repeats", 1), ("warm_up", 0)):
            _check_at_least(name, getattr(self, name), least)
        if self.num_requests is not None:
            _check_at_least("num_requests", self.num_requests, 1)
        for name in ("seconds", "ttft_limit_ms", "tpot_limit_ms"):
            _check_positive(name, getattr(self, name))
        if self.drain_seconds is not None:
            _check_positive("drain_seconds", self.drain_seconds)
        for name, values in (("rates", self.rates), ("load_shares", self.load_shares)):
            _check_each_once(name, values)
            for value in values or ():
                _check_positive(name, value)
        self._check_subject()

    def _check_subject(self) -> None:
        if self.url is not None and self.policies is not None:
            raise ValueError("a server has its own policy: give either policies or url")
        if self.url is None and (self.api_key or self.url_model):
            raise ValueError("api_key and url_model belong to a running server: give its url, too")
        _check_each_once("policies", self.policies)
        for policy in self.policies or ():
            get_policy(policy)


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0 and finite, got {value:g}")


def _check_each_once(name: str, values: Sequence[object] | None) -> None:
    if values is not None and (not values or len(set(values)) < len(values)):
        raise ValueError(f"{name} must hold at least one value and none twice, got {values}")
