"""Verdicts: results of the checks, stored for this computer, these versions and this model's shape."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from neo_desktop import native
from neo_desktop.engine.cache_files import Key, cache_folder, digest, read_json, write_json
from neo_desktop.engine.doctor.outcome import Outcome, Result, limits_of, unserved
from neo_desktop.engine.fallbacks import Fallbacks
from neo_desktop.engine.profiling.profile_cache import model_key, processors_key
from neo_desktop.models.config import ModelConfig

CANNOT_KEEP = "the results of checks on this computer cannot be saved"
CHECKS_VERSION = 4  # raise it when the checks or their methods change


@dataclass(frozen=True, slots=True)
class Verdict:
    """All outcomes, and the key of their configuration."""

    key: Key
    outcomes: tuple[Outcome, ...]
    is_quick: bool
    checked_at: str  # UTC

    @property
    def has_begun(self) -> bool:
        return any(outcome.name != "start" for outcome in self.outcomes)

    @property
    def lost(self) -> list[Outcome]:
        """Mechanisms that fail at every level, as the outcome of the lowest level."""
        return [outcome for outcome in unserved(self.outcomes) if outcome.mechanism is not None]

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.has_failed]

    @property
    def is_complete(self) -> bool:
        """True if all checks had memory; the answers of a quick check do not count.

        A model without room beside other programs will have none at the next start either.
        """
        missed = (outcome for outcome in self.outcomes if outcome.result is Result.NO_MEMORY)
        return all(self.is_quick and outcome.needs_model for outcome in missed)

    def apply(self, fallbacks: Fallbacks) -> None:
        """Limit the fallbacks to working levels; log one line per mechanism changed."""
        for limit in limits_of(self.outcomes):
            fallbacks.limit(limit.mechanism, limit.level, f"a check on this computer failed: {limit.reason}")

    def to_json(self) -> dict[str, Any]:
        return {
            "key": dict(self.key),
            "checked_at": self.checked_at,
            "is_quick": self.is_quick,
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
        }


def new_verdict(key: Key, outcomes: Sequence[Outcome], *, is_quick: bool) -> Verdict:
    """Make a verdict with the current time."""
    return Verdict(key, tuple(outcomes), is_quick, time.strftime("%Y-%m-%d %H:%M", time.gmtime()))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def verdict_key(device: torch.device, config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return what decides which levels work; nothing identifies the owner or the model's name."""
    return {
        **processors_key(device),
        "triton": _version("triton"),
        "isas": list(native.available_isas()),
        "checks": CHECKS_VERSION,
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "model": model_key(config),
    }


def verdict_path(key: Key) -> Path:
    """Return the path of a verdict, which need not exist."""
    return cache_folder("doctor") / f"{digest(key)}.json"


def read_verdict(key: Key) -> Verdict | None:
    """Return the stored verdict; None if it is missing or unusable."""
    data = read_json(verdict_path(key))
    if data is None or data.get("key") != dict(key):
        return None
    try:
        outcomes = tuple(Outcome.from_json(outcome) for outcome in data["outcomes"])
        return Verdict(key, outcomes, bool(data["is_quick"]), str(data["checked_at"]))
    except (KeyError, TypeError, ValueError):
        return None


def keep(verdict: Verdict) -> None:
    """Save a verdict, unless the next start may find out more."""
    if verdict.has_begun and verdict.is_complete:
        write_json(verdict_path(verdict.key), verdict.to_json(), CANNOT_KEEP)
