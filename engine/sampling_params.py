"""Sampling parameters: the choice of tokens and the end of an output."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from neo_desktop.engine.errors import SettingError
from neo_desktop.models.limits import SAMPLING_BOUNDS
from neo_desktop.models.thoughts import Thoughts

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIAS = 100.0
RANDOM_SEEDS = (-1, 2**32 - 1)  # vLLM's and llama.cpp's values for "no seed"
LEAST_TEMPERATURE = 2.0**-126  # smaller values are 0 in float32 on some devices

NUMBERS: Mapping[str, tuple[float, float]] = {
    **{name: SAMPLING_BOUNDS[name] for name in ("temperature", "min_p", "repetition_penalty")},
    "top_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
INTEGERS = {
    "max_tokens": (1, None),
    "top_k": (0, None),
    "seed": (-(2**63), 2**63 - 1),
    "thought_tokens": (0, None),
    "logprobs": (0, MAX_LOGPROBS),
    "n": (1, MAX_CHOICES),
}

Pooling = Literal["mean", "last"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request; the defaults sample from the model's own distribution.

    Raises:
        SettingError: a value is out of range.
    """

    max_tokens: int | None = None  # limit on output tokens; None: until the context is full
    temperature: float = 1.0  # below LEAST_TEMPERATURE: greedy, always the most probable token
    top_k: int = 0  # keep only the k most probable tokens; 0: keep all
    top_p: float = 1.0  # keep the smallest set of tokens with at least this probability;
    min_p: float = 0.0  # drop tokens less probable than min_p times the most probable one
    repetition_penalty: float = 1.0  # divides the logits of tokens seen in prompt and output (CTRL);
    presence_penalty: float = 0.0  # subtracted once from the logits of tokens in the output
    frequency_penalty: float = 0.0  # subtracted once per occurrence in the output
    seed: int | None = None  # same seed, same tokens, in any batch; -1: none
    stop: Sequence[str] = ()  # text that ends the output and is excluded
    # position of thoughts, in which stop strings do not count; None: raw text
    thoughts: Thoughts | None = None
    thought_tokens: int | None = None  # limit on tokens of thoughts, whose end is then forced; None: no limit
    stop_token_ids: Sequence[int] = ()  # tokens that end the output, in addition to the model's own
    logprobs: int | None = None  # return log-probabilities of the chosen token and this many top ones;
    n: int = 1  # independent outputs per prompt
    # continue after the model's end-of-sequence token; a grammar still ends the output
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit, ±100
    # return the prompt's hidden states instead of an output: their mean, or the last one
    pooling: Pooling | None = None
    grammar: str | None = None  # constraint on the output, for llguidance; see `engine.grammar`
    grammar_after: str | None = None  # text before the constrained part, for example the end of a thought
    speculation: bool = True  # verify drafts where that is faster; the tokens are the same
    prediction: str | None = None  # text that the output probably resembles: a source of drafts

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _sequence("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _sequence("stop_token_ids", self.stop_token_ids))
        if not isinstance(self.logit_bias, Mapping):
            raise SettingError("logit_bias", f"must map token ids to numbers, got {self.logit_bias!r}")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

        for name, bounds in NUMBERS.items():
            _check_number(name, getattr(self, name), *bounds)
        if self.top_p == 0:
            raise SettingError("top_p", "must be above 0 and at most 1, got 0")
        if type(self.seed) is int and self.seed in RANDOM_SEEDS:
            object.__setattr__(self, "seed", None)
        for name, limits in INTEGERS.items():
            if (value := getattr(self, name)) is not None or name in ("top_k", "n"):
                _check_integer(name, value, *limits)
        if len(stop) > MAX_STOP_STRINGS:
            raise SettingError("stop", f"may hold at most {MAX_STOP_STRINGS} strings, got {len(stop)}")
        if any(not isinstance(text, str) or not text for text in stop):
            raise SettingError("stop", "must hold strings that are not empty")
        if self.thoughts not in (None, *get_args(Thoughts)):
            names = " or ".join(get_args(Thoughts))
            raise SettingError("thoughts", f"must be {names}, got {self.thoughts!r}")
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, 0)
        for token_id, bias in self.logit_bias.items():
            _check_integer("logit_bias", token_id, 0)
            _check_number("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if not isinstance(self.prediction, str | None):
            raise SettingError("prediction", f"must be text, got {self.prediction!r}")
        _check_grammar(self)
        _check_pooling(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE

    @property
    def is_truncated(self) -> bool:
        return self.top_k != 0 or self.top_p != 1.0 or self.min_p != 0.0

    @property
    def has_penalties(self) -> bool:
        """True if earlier tokens change the logits, so that the sampler needs them."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _check_grammar(params: SamplingParams) -> None:
    for name, text in (("grammar", params.grammar), ("grammar_after", params.grammar_after)):
        if text is not None and (not isinstance(text, str) or not text):
            raise SettingError(name, f"must be text that is not empty, got {text!r}")
    if params.grammar_after is not None and params.grammar is None:
        raise SettingError("grammar_after", "needs a grammar")


def _check_pooling(params: SamplingParams) -> None:
    if params.pooling is None:
        return
    if params.pooling not in get_args(Pooling):
        raise SettingError(
            "pooling", f"must be one of {', '.join(get_args(Pooling))}, got {params.pooling!r}"
        )
    if params.n != 1 or params.logprobs is not None or params.grammar is not None:
        raise SettingError(
            "pooling", "returns no output, so n, logprobs and grammar cannot be combined with it"
        )


def _sequence(name: str, values: object) -> tuple[Any, ...]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise SettingError(name, f"must be a list, got {values!r}")
    return tuple(values)


def _check_number(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SettingError(name, f"must be a finite number, got {value!r}")
    if not low <= value <= high:  # False for NaN
        if isinstance(value, float) and not math.isfinite(value):
            raise SettingError(name, f"must be a finite number, got {value!r}")
        raise SettingError(name, f"must be between {low:g} and {high:g}, got {value}")


def _check_integer(name: str, value: int, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingError(name, f"must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise SettingError(name, f"must be {bounds}, got {value}")
