"""The parts of the endpoints' bodies.

A field that a model declares does what its name says. Of the others, some are known:

    HINTS               they change nothing that a client can see: labels, caching, display
    LEFT_OUT            the answer does without them, and a warning beside the answer says so
    ABSENT, DEFAULTS    an error, unless the value asks for nothing (`store=False`)

Any other field is an error that names it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from neo_desktop.app.generate.images import joined, text_part
from neo_desktop.app.generate.tools import Tool
from neo_desktop.app.web.warnings import warn

MAX_TOOLS = 256

Json = dict[str, Any]

# Other names of a field.
SYNONYMS = {
    "max_completion_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "reasoning": "reasoning_content",
}
HINTS = frozenset(
    [
        *("client_metadata", "metadata", "request_id", "safety_identifier", "service_tier", "user"),
        *("user_profile_id", "workspace_id", "anthropic_beta", "anthropic_version", "betas"),
        *("cache_control", "cache_prompt", "prompt_cache_breakpoint", "prompt_cache_key"),
        *("prompt_cache_options", "prompt_cache_retention", "billing_policy", "diagnostics", "fallbacks"),
        *("fallback_credit_token", "annotations", "citations", "detail", "display", "generate_summary"),
        *("include_obfuscation", "index", "max_tool_calls", "phase", "signature", "speed", "status"),
        *("stream_options", "task_budget", "truncation", "defer_loading", "eager_input_streaming"),
        "output_schema",
    ]
)
_KEEP_THOUGHTS = {"type": "clear_thinking_20251015", "keep": "all"}  # agents send it; nothing is cleared
# Field -> the warning, and the values without one.
LEFT_OUT: Mapping[str, tuple[str, Sequence[object]]] = {
    "context_management": (
        "context_management is left out: the conversation is read as it was sent",
        [{"edits": []}, {"edits": [_KEEP_THOUGHTS]}],
    ),
    "encrypted_content": ("encrypted thoughts are left out: only their maker can read them", []),
    "input_examples": ("input_examples are left out: put them into the description", []),
    "verbosity": ("verbosity is left out: no model here knows it", ["medium"]),
}
# They may be null, false, 0 or empty.
ABSENT = frozenset(
    [
        *("access_programs", "allowed_token_ids", "async", "audio", "background", "background_options"),
        *("bad_words", "block_binding", "chat_template", "clear_at", "compaction", "container"),
        *("continuous_usage_stats", "conversation", "documents", "dry_multiplier", "dynatemp_range", "echo"),
        *("file_id", "functions", "include_stop_str_in_output", "inference_geo", "logits_processors"),
        *("mcp_servers", "min_tokens", "mirostat", "moderation", "n_keep", "output_config", "priority"),
        *("prompt", "prompt_logprobs", "refusal", "return_progress", "return_tokens_as_token_ids", "store"),
        *("structural_tag", "thread", "timings_per_token", "toolset_name", "transformations"),
        *("truncate_prompt_tokens", "use_beam_search", "web_search_options", "xtc_probability"),
    ]
)
# They may be null, or what this server does anyhow.
DEFAULTS: Mapping[str, Sequence[object]] = {
    "allowed_callers": [["direct"]],
    "best_of": [1],
    "caller": [{"type": "direct"}],
    "context": ["auto"],
    "function_call": ["none", "auto"],
    "id_slot": [-1],
    "include_reasoning": [True],
    "length_penalty": [1, 1.0],
    "modalities": [["text"]],
    "mode": ["standard"],
    "normalize": [True],
    "reasoning_format": ["auto", "deepseek"],
    "repeat_last_n": [-1],
    "skip_special_tokens": [True],
    "spaces_between_special_tokens": [True],
    "typical_p": [1, 1.0],
}


class Model(BaseModel):
    """A body or a part of one."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _declared(cls, fields: object) -> object:
        """Leave the fields that the model declares, and those that are unknown."""
        if not isinstance(fields, dict):
            return fields
        own, left = names(cls), dict[Any, Any]()
        for name, value in fields.items():
            field = name if name in own else SYNONYMS.get(name, name)
            if field not in own and _is_known(name, value):
                continue
            if None not in (value, left.get(field)):
                raise _refused(name, "is given under two names: leave one of them out")
            left[field] = left.get(field) if value is None else value
        return left


@cache
def names(model: type[Model]) -> frozenset[str]:
    """The fields that a model declares, as clients call them."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


def _is_known(name: str, value: object) -> bool:
    """Return whether a field is in the tables; raise an error if it asks for what is not there."""
    if name in LEFT_OUT:
        warning, silent = LEFT_OUT[name]
        if value and value not in silent:
            warn(warning)
    elif name in ABSENT or name in DEFAULTS:
        is_default = any(type(value) is type(one) and value == one for one in DEFAULTS.get(name, ()))
        if not (value is None or is_default or (name in ABSENT and not value)):
            raise _refused(name, "is not supported by this server; leave it out")
    else:
        return name in HINTS
    return True


def _refused(name: str, reason: str) -> ValidationError:
    error = PydanticCustomError("field", "{reason}", {"reason": reason})
    return ValidationError.from_exception_data(name, [{"type": error, "loc": (name,), "input": None}])


def described(what: str) -> WrapValidator:
    """One sentence in place of one error per alternative of a union."""

    def check(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("type", "must be {what}", {"what": what}) from None

    return WrapValidator(check)


class Skipped(Model):
    """A part of a body that the answer does without."""

    type: str


@dataclass(frozen=True, eq=False)
class Tagged:
    """A union of models that their field `type` tells apart, and of texts that may stand in their place.

    Of other types, `*` stands for anything.
    """

    refused: Mapping[str, str] = field(default_factory=dict)  # type → the sentence that refuses it
    left_out: Mapping[str, str] = field(default_factory=dict)  # what becomes `Skipped` → the end of a warning

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        models = tagged_models(union)
        words = literals(union)
        return core_schema.no_info_wrap_validator_function(
            lambda value, _: self._part(value, models, words), handler(union)
        )

    def _part(self, value: object, models: Mapping[str, type[Model]], words: Sequence[str]) -> object:
        if isinstance(value, str) and value in words:
            return value
        if not isinstance(value, dict):
            what = " or ".join([*map(repr, words), "an object"])
            raise PydanticCustomError("object", "must be {what}", {"what": what})
        defaults = (tag for tag, model in models.items() if not model.model_fields["type"].is_required())
        tag = value.get("type") or next(defaults, None)
        if not isinstance(tag, str):
            reason = "is missing its type" if tag is None else "has a type that is not text"
            raise PydanticCustomError("tag", reason)
        if tag in models:
            return models[tag].model_validate(value | {"type": tag})
        if (warning := _matching(self.left_out, tag)) is not None:
            warn(f"a part of type {tag!r} {warning}")
            return Skipped(type=tag)
        reason = _matching(self.refused, tag) or f"this server takes {', '.join(map(repr, models))}"
        raise PydanticCustomError("tag", "is of type {tag}: {what}", {"tag": repr(tag[:100]), "what": reason})


def tagged_models(union: Any) -> dict[str, type[Model]]:
    """Map the values of `type` to the models of a union that are for them."""
    parts = [part for part in (union, *get_args(union)) if isinstance(part, type) and issubclass(part, Model)]
    return {tag: part for part in parts for tag in literals(part.model_fields["type"].annotation)}


def literals(annotation: Any) -> list[str]:
    """The texts that a type takes."""
    parts = [value for part in (annotation, *get_args(annotation)) for value in get_args(part)]
    return [value for value in parts if isinstance(value, str)]


def _matching(sentences: Mapping[str, str], tag: str) -> str | None:
    for pattern, sentence in sentences.items():
        if pattern == tag or (pattern.endswith("*") and tag.startswith(pattern[:-1])):
            return sentence
    return None


NOT_TEXT: Mapping[str, str] = dict.fromkeys(
    [
        *("image", "image_url", "input_image", "input_audio", "audio", "video", "video_url", "input_video"),
        *("file", "input_file", "document", "container_upload", "computer_screenshot", "browser_state"),
    ],
    "this part takes text only",
)


def content(part: Any) -> PlainValidator:
    """Text or parts: one text, a line per part; or, with images, parts for a `Conversation`."""
    parts: TypeAdapter[list[Any]] = TypeAdapter(list[part])

    def check(value: object) -> object:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise PydanticCustomError("content", "must be text or a list of text parts")
        return joined(each.part for each in parts.validate_python(value))

    return PlainValidator(check, json_schema_input_type=str | list[part])


class TextPart(Model):
    """Text, with what clients put beside it."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    logprobs: Any = None

    @property
    def part(self) -> Json:
        """The part for a `Conversation`."""
        return text_part(self.text)


class RefusalPart(Model):
    """Text with which the assistant refused."""

    type: Literal["refusal"]
    refusal: str

    @property
    def part(self) -> Json:
        return text_part(self.refusal)


Content = Annotated[str, content(Annotated[TextPart | RefusalPart, Tagged(refused=NOT_TEXT)])]
ToolName = Annotated[str, Field(min_length=1, max_length=256)]


class Function(Model):
    """A tool as OpenAI's clients describe it."""

    name: ToolName
    description: str | None = None
    parameters: Json | None = None  # JSON schema
    strict: bool | None = None  # a schema that cannot be enforced in full is refused

    def tool(self, name: str) -> Tool:
        return Tool(name, self.description, self.parameters or {}, bool(self.strict))


class SchemaFormat(Model):
    """The form of an answer."""

    type: Literal["json_schema"] = "json_schema"
    name: Any = None
    description: Any = None
    schema_: Json = Field(alias="schema")
    strict: bool | None = None  # a schema that cannot be enforced in full is refused


def _as_list(prompt: object) -> object:
    """One prompt, as text or token ids, as a list of prompts."""
    is_one = isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int))
    return [prompt] if is_one else prompt


Prompts = Annotated[
    list[str | Annotated[list[int], Field(min_length=1)]],
    Field(min_length=1),
    BeforeValidator(_as_list, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    described("a string, a list of strings, a list of token ids or a list of such lists"),
]


def given(fields: Mapping[str, Any]) -> Json:
    """Drop the fields that are null."""
    return {name: value for name, value in fields.items() if value is not None}
