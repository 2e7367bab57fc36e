"""The settings that all ways to generate have in common, under OpenAI's, vLLM's and llama.cpp's names."""

from typing import Annotated, Any, Literal

from pydantic import Field

from neo_desktop.app.api.fields import Json, Model, SchemaFormat, described
from neo_desktop.app.errors import ApiError
from neo_desktop.app.generate.outputs import sampling_params
from neo_desktop.app.generate.structure import Kind, Source, Structure
from neo_desktop.engine.errors import SettingError
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.config import GenerationDefaults

# The engine's names of settings.
SETTINGS = (
    *("max_tokens", "n", "seed", "stop", "temperature", "top_p", "top_k", "presence_penalty"),
    *("frequency_penalty", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos"),
)
TokenId = Annotated[int, Field(strict=False, ge=0, lt=10**9)]  # JSON writes it as text


class StructuredOutputs(Model):
    """vLLM's way to ask for one form."""

    # `json` is a method of pydantic's models.
    json_: Annotated[Json | str | None, described("a JSON schema")] = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StreamOptions(Model):
    include_usage: bool | None = None


class ResponseFormat(Model):
    """OpenAI's `response_format`; llama.cpp puts the schema beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None
    schema_: Json | None = Field(default=None, alias="schema")


class SampledRequest(Model):
    """Fields have the engine's names of settings; a protocol's own name is the field's alias."""

    def sampling_params(self, defaults: GenerationDefaults, **more: Any) -> SamplingParams:
        """Return the settings; what is null is the model's own recommendation."""
        fields = type(self).model_fields
        values = {name: getattr(self, name) for name in SETTINGS if name in fields}
        try:
            return sampling_params(defaults, **values | more)
        except SettingError as error:
            raise error.named({name: one.alias for name, one in fields.items() if one.alias}) from error


class GenerationRequest(SampledRequest):
    """The common fields of chats and raw completions."""

    model: str | None = None  # None: the model that is served
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tokens: int | None = None  # -1: until the context is full
    n: int | None = None
    seed: int | None = None
    stop: Annotated[str | list[str] | None, described("a string or a list of strings")] = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[
        dict[TokenId, float] | None, described("an object of token ids and numbers from -100 to 100")
    ] = None

    # Beyond OpenAI's: what vLLM and llama.cpp call it.
    top_k: int | None = None  # 0 or -1: all tokens
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None

    # The answer's form; at most one of these.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: str | None = None
    json_schema: Json | None = None

    speculation: Literal["auto", "off"] | None = None  # off: verify no drafts, see docs/dev/speculation.md

    return_token_ids: bool | None = None  # vLLM's: beside the text, those of prompt and output

    @property
    def include_usage(self) -> bool:
        """True: a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def structure(self) -> Structure | None:
        """Return the form that the answer must have; None: any."""
        outputs = self.structured_outputs or StructuredOutputs()
        sources: list[tuple[str, Kind, Source | None]] = [
            ("json_schema", "json_schema", self.json_schema),
            ("structured_outputs.json", "json_schema", outputs.json_),
            ("structured_outputs.regex", "regex", outputs.regex),
            ("structured_outputs.choice", "choice", outputs.choice),
            ("grammar", "grammar", self.grammar),
            ("structured_outputs.grammar", "grammar", outputs.grammar),
            ("structured_outputs.json_object", "json", "" if outputs.json_object else None),
        ]
        asked = [Structure(field, kind, source) for field, kind, source in sources if source is not None]
        asked += _structures(self.response_format) if self.response_format is not None else []
        if len(asked) > 1:
            fields = " and ".join(one.field for one in asked)
            message = f"{fields} each ask for a form of the answer: give one of them"
            raise ApiError(400, message, param=asked[1].field)
        return asked[0] if asked else None

    def sampling_params(self, defaults: GenerationDefaults, **more: Any) -> SamplingParams:
        changed: dict[str, Any] = {
            "max_tokens": None if self.max_tokens == -1 else self.max_tokens,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "logit_bias": self.logit_bias or None,
            "speculation": self.speculation != "off",
        }
        return super().sampling_params(defaults, **changed | more)


def _structures(form: ResponseFormat) -> list[Structure]:
    """Return the form that OpenAI's clients ask for, if any."""
    if form.schema_ is not None and form.json_schema is not None:
        raise SettingError("response_format", "has schema and json_schema: give one of them")
    schema = form.schema_ if form.json_schema is None else form.json_schema.schema_
    if form.type == "text" and schema is not None:
        raise SettingError("response_format", "has a schema and the type text: use the type json_schema")
    if form.type == "json_schema" and schema is None:
        raise SettingError("response_format", "needs json_schema.schema")
    if form.type == "text":
        return []
    if schema is None:
        return [Structure("response_format", "json")]
    is_strict = form.json_schema is not None and bool(form.json_schema.strict)
    return [Structure("response_format", "json_schema", schema, is_strict)]
