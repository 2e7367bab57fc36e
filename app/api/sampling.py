"""The settings that all ways to generate have in common, under OpenAI's, vLLM's and llama.cpp's names."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from neo_desktop.app.api.fields import HINT, Json, Label, Model, Only, Unsupported, described, given
from neo_desktop.app.errors import ApiError
from neo_desktop.app.generate.sampling import sampling_params
from neo_desktop.app.generate.structure import Kind, Source, Structure, one_of
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.config import GenerationDefaults

# Two names of one setting: (the one used here, the other one).
SYNONYMS = (
    ("max_tokens", "max_completion_tokens"),
    ("max_tokens", "n_predict"),
    ("repetition_penalty", "repeat_penalty"),
)


def _logit_bias(value: object) -> dict[int, float] | None:
    """Token id -> what is added to its logit; JSON writes the ids as strings."""
    if value is None:
        return None
    message = "must map token ids to numbers from -100 to 100"
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", message)
    biases = {}
    for token_id, bias in value.items():
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) < 10 and is_number):
            raise PydanticCustomError("logit_bias", message)
        biases[int(token_id)] = float(max(min(bias, 1e9), -1e9))
    return biases


_LOGIT_BIAS_SCHEMA = {
    "type": ["object", "null"],
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
}


class StructuredOutputs(Model):
    """vLLM's way to ask for one form."""

    # `json` is a method of pydantic's models.
    json_: Annotated[Json | str | None, described("a JSON schema")] = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: Unsupported = None


class StreamOptions(Model):
    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, HINT] = None  # nothing is padded
    continuous_usage_stats: Annotated[Any, Only(False)] = None


class JsonSchemaFormat(Model):
    name: Label = None
    description: Label = None
    schema_: Json = Field(alias="schema")
    strict: bool | None = None  # a schema that cannot be enforced in full is refused


class ResponseFormat(Model):
    """OpenAI's `response_format`; llama.cpp puts the schema beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Json | None = Field(default=None, alias="schema")


class GenerationRequest(Model):
    """The common fields of chats and raw completions."""

    model: str | None = None  # None: the model that is served
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: Annotated[str | list[str] | None, described("a string or a list of strings")] = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[
        dict[int, float] | None, PlainValidator(_logit_bias), WithJsonSchema(_LOGIT_BIAS_SCHEMA)
    ] = None

    # Beyond OpenAI's: what vLLM and llama.cpp call it.
    top_k: int | None = None  # 0 or -1: all tokens
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    n_predict: int | None = None  # -1: until the context is full
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None

    # The answer's form; at most one of these.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[Json | str | None, described("a JSON schema")] = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: Json | None = None

    speculation: Literal["auto", "off"] | None = None  # off: verify no drafts, see docs/dev/speculation.md

    return_token_ids: bool | None = None  # vLLM's: beside the text, those of prompt and output

    # Labels and hints: they say nothing about the answer.
    user: Label = None
    request_id: Label = None
    cache_prompt: Annotated[bool | None, HINT] = None  # prompts are always cached, which changes no token
    return_progress: Annotated[Any, Only(False)] = None
    timings_per_token: Annotated[Any, Only(False)] = None

    # vLLM's and llama.cpp's defaults, which some clients send always.
    allowed_token_ids: Unsupported = None
    bad_words: Annotated[Any, Only([])] = None
    dry_multiplier: Annotated[Any, Only(0, 0.0)] = None
    dynatemp_range: Annotated[Any, Only(0, 0.0)] = None
    id_slot: Annotated[Any, Only(-1)] = None
    include_stop_str_in_output: Annotated[Any, Only(False)] = None
    length_penalty: Annotated[Any, Only(1, 1.0)] = None
    logits_processors: Annotated[Any, Only([])] = None
    min_tokens: Annotated[Any, Only(0)] = None
    mirostat: Annotated[Any, Only(0)] = None
    n_keep: Annotated[Any, Only(0)] = None
    priority: Annotated[Any, Only(0)] = None
    prompt_logprobs: Annotated[Any, Only(False)] = None
    repeat_last_n: Annotated[Any, Only(-1)] = None
    return_tokens_as_token_ids: Annotated[Any, Only(False)] = None
    skip_special_tokens: Annotated[Any, Only(True)] = None
    spaces_between_special_tokens: Annotated[Any, Only(True)] = None
    truncate_prompt_tokens: Unsupported = None
    typical_p: Annotated[Any, Only(1, 1.0)] = None
    use_beam_search: Annotated[Any, Only(False)] = None
    xtc_probability: Annotated[Any, Only(0, 0.0)] = None

    @model_validator(mode="after")
    def _check_synonyms(self) -> Self:
        for one, other in SYNONYMS:
            if None not in (getattr(self, one), getattr(self, other, None)):
                message = "has {one} and {other}: give one of them"
                raise PydanticCustomError("pair", message, {"one": one, "other": other})
        return self

    @property
    def include_usage(self) -> bool:
        """True: a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def structure(self) -> Structure | None:
        """Return the form that the answer must have; None: any.

        Raises:
            ApiError: the body asks for more than one.
        """
        outputs = self.structured_outputs or StructuredOutputs()
        sources: list[tuple[str, Kind, Source | None]] = [
            ("json_schema", "json_schema", self.json_schema),
            ("guided_json", "json_schema", self.guided_json),
            ("structured_outputs.json", "json_schema", outputs.json_),
            ("guided_regex", "regex", self.guided_regex),
            ("structured_outputs.regex", "regex", outputs.regex),
            ("guided_choice", "choice", self.guided_choice),
            ("structured_outputs.choice", "choice", outputs.choice),
            ("grammar", "grammar", self.grammar),
            ("guided_grammar", "grammar", self.guided_grammar),
            ("structured_outputs.grammar", "grammar", outputs.grammar),
            ("structured_outputs.json_object", "json", "" if outputs.json_object else None),
        ]
        asked = [Structure(field, kind, source) for field, kind, source in sources if source is not None]
        form = None if self.response_format is None else _structure_of(self.response_format)
        return one_of(asked if form is None else [*asked, form])

    def _sampling_params(
        self,
        defaults: GenerationDefaults,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prediction: str | None = None,
    ) -> SamplingParams:
        penalty = self.repeat_penalty if self.repetition_penalty is None else self.repetition_penalty
        return sampling_params(
            defaults,
            max_tokens=max_tokens,
            logprobs=logprobs,
            n=self.n,
            seed=self.seed,
            stop=self.stop,
            temperature=self.temperature,
            top_p=self.top_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            top_k=0 if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            repetition_penalty=penalty,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logit_bias=self.logit_bias or None,
            speculation=self.speculation != "off",
            prediction=prediction,
        )

    def _max_tokens(self, newer_name: int | None = None) -> int | None:
        asked = given({"max_tokens": self.max_tokens, "newer": newer_name})
        if self.n_predict is not None and self.n_predict != -1:
            return self.n_predict
        return next(iter(asked.values()), None)


def _structure_of(form: ResponseFormat) -> Structure | None:
    """Return the form that OpenAI's clients ask for; None: any text."""
    if form.schema_ is not None and form.json_schema is not None:
        message = "response_format has schema and json_schema: give one of them"
        raise ApiError(400, message, param="response_format")
    schema = form.schema_ if form.json_schema is None else form.json_schema.schema_
    if form.type == "text" and schema is not None:
        message = "response_format has a schema, which its type text leaves out: use the type json_schema"
        raise ApiError(400, message, param="response_format")
    if form.type == "text":
        return None
    if schema is not None:
        return Structure(
            "response_format", "json_schema", schema, bool(form.json_schema and form.json_schema.strict)
        )
    if form.type == "json_schema":
        raise ApiError(400, "response_format needs json_schema.schema", param="response_format")
    return Structure("response_format", "json")
