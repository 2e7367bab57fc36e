"""A request's settings, over the model's own recommendations."""

from typing import Any

from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.config import GenerationDefaults


def sampling_params(defaults: GenerationDefaults, **asked: Any) -> SamplingParams:
    """Return what was asked for; what was left open (None) is the model's own recommendation."""
    values: dict[str, Any] = {
        "temperature": 0.0 if defaults.do_sample is False else defaults.temperature,
        **{name: getattr(defaults, name) for name in ("top_k", "top_p", "min_p", "repetition_penalty")},
    }
    values |= {name: value for name, value in asked.items() if value is not None}
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})
