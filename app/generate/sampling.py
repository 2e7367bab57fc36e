"""A request's settings, over the model's own recommendations."""

from collections.abc import Mapping
from typing import Any

from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.config import GenerationDefaults


def sampling_params(defaults: GenerationDefaults, **asked: Any) -> SamplingParams:
    """Return what was asked for; what was left open (None) is the model's own recommendation.

    Raises:
        SettingError: a value is out of range.
    """
    return SamplingParams(**(_recommended(defaults) | _given(asked)))


def _recommended(defaults: GenerationDefaults) -> dict[str, Any]:
    return _given(
        {
            "temperature": 0.0 if defaults.do_sample is False else defaults.temperature,
            "top_k": defaults.top_k,
            "top_p": defaults.top_p,
            "min_p": defaults.min_p,
            "repetition_penalty": defaults.repetition_penalty,
        }
    )


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
