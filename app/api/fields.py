"""The parts of the endpoints' bodies.

An unknown field is an error that names it. A field does what its name says, unless a mark says otherwise:

    HINT       it changes nothing that a client can see: labels, caching, display
    LeftOut    the answer does without it, and a warning beside the answer says so
    Only       an error, unless its value asks for nothing (`store=False`)
"""

import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeGuard, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from neo_desktop.app.generate.images import joined, text_part
from neo_desktop.app.web.warnings import warn

MAX_TOOLS = 256

Json = dict[str, Any]


class Model(BaseModel):
    """A body or a part of one."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


class Only:
    """For a feature that is not there: a field that takes only values that do not ask for it."""

    def __init__(self, *accepted: object) -> None:
        self._accepted = (None, *accepted)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, _: CoreSchema, __: GetJsonSchemaHandler) -> Json:
        return {"enum": list(self._accepted), "description": "Only for clients that always send it."}

    def _check(self, value: object) -> object:
        if not any(type(value) is type(one) and value == one for one in self._accepted):
            raise PydanticCustomError("unsupported", "is not supported by this server; leave it out")
        return value


class LeftOut:
    """For a wish that the answer does without: a warning says so, unless the value is one of `silent`."""

    def __init__(self, what: str, *silent: object) -> None:
        self._what = what
        self._silent = (None, *silent)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: object) -> object:
        if value not in self._silent:
            warn(self._what)
        return value


HINT = object()
Unsupported = Annotated[Any, Only()]
Label = Annotated[str | None, HINT]
Verbosity = Annotated[
    Literal["low", "medium", "high"] | None,
    LeftOut("verbosity is left out: no model here knows it", "medium"),
]


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


# Written by what a value is, not by what it was read from.
_AS_IT_IS = core_schema.plain_serializer_function_ser_schema(lambda value: value)


class Tagged:
    """A union of models that their field `type` tells apart.

    Args:
        models: each says in `type` what it is for.
        refused: other types, `*` stands for anything → the sentence that refuses them.
        left_out: further ones, which become `Skipped` → the warning, without its subject.
        default: what a part without `type` is.
        words: texts that may stand in place of an object.
    """

    def __init__(
        self,
        *models: type[Model],
        refused: Mapping[str, str] = types.MappingProxyType({}),
        left_out: Mapping[str, str] = types.MappingProxyType({}),
        default: str | None = None,
        words: Sequence[str] = (),
    ) -> None:
        self.models = {tag: model for model in models for tag in tags(model)}
        self.refused = refused
        self.left_out = left_out
        self._default = default
        self._words = words

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {in_marks(tag): handler.generate_schema(model) for tag, model in self.models.items()}
        union = core_schema.tagged_union_schema(choices, discriminator=self._tag_in_marks)
        return core_schema.no_info_wrap_validator_function(self._check, union, serialization=_AS_IT_IS)

    def _check(self, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        if isinstance(value, str) and value in self._words:
            return value
        if not isinstance(value, dict):
            what = " or ".join([*map(repr, self._words), "an object"])
            raise PydanticCustomError("object", "must be {what}", {"what": what})
        tag = value.get("type") or self._default
        if not isinstance(tag, str):
            reason = "is missing its type" if tag is None else "has a type that is not text"
            raise PydanticCustomError("tag", reason)
        if tag in self.models:
            return handler(value if value.get("type") else value | {"type": tag})
        if (warning := _matching(self.left_out, tag)) is not None:
            warn(f"a part of type {tag!r} {warning}")
            return Skipped(type=tag)
        known = ", ".join(map(repr, self.models))
        reason = _matching(self.refused, tag) or f"this server takes {known}"
        raise PydanticCustomError("tag", "is of type {tag}: {what}", {"tag": repr(tag[:100]), "what": reason})

    def _tag_in_marks(self, value: Json) -> str:
        return in_marks(value["type"])


def tags(model: type[Model]) -> tuple[str, ...]:
    """The values of `type` that a model is for."""
    annotation = model.model_fields["type"].annotation
    return tuple(value for part in (annotation, *get_args(annotation)) for value in _literals(part))


def _literals(annotation: Any) -> tuple[str, ...]:
    return tuple(value for value in get_args(annotation) if isinstance(value, str))


def in_marks(tag: str) -> str:
    """A tag as it stands in the place of an error, which is no field of the body."""
    return f"<{tag}>"


def _matching(sentences: Mapping[str, str], tag: str) -> str | None:
    found = (said for name, said in sentences.items() if name == tag or _is_beginning(name, tag))
    return next(found, None)


def _is_beginning(pattern: str, tag: str) -> bool:
    return pattern.endswith("*") and tag.startswith(pattern[:-1])


TEXT_ONLY = "this part takes text only"
NOT_TEXT: Mapping[str, str] = dict.fromkeys(
    [
        *("image", "image_url", "input_image", "input_audio", "audio", "video", "video_url", "input_video"),
        *("file", "input_file", "document", "container_upload", "computer_screenshot", "browser_state"),
    ],
    TEXT_ONLY,
)


class Joined:
    """Text, or text parts, which become one text, a line each.

    Args:
        parts: models with a `text`.
        refused: see `Tagged`.
    """

    def __init__(self, *parts: type[Model], refused: Mapping[str, str] = NOT_TEXT) -> None:
        self.union = Tagged(*parts, refused=refused)

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        parts = core_schema.list_schema(handler.generate_schema(Annotated[Any, self.union]))
        return core_schema.no_info_wrap_validator_function(self._check, parts, serialization=_AS_IT_IS)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        parts = handler(schema["schema"])
        return {"anyOf": [{"type": "string"}, parts]}

    def _check(self, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise PydanticCustomError("content", "must be text or a list of text parts")
        return self._content(handler(value))

    def _content(self, parts: list[Any]) -> Any:
        return "\n".join(part.text for part in parts)


class Parts(Joined):
    """Joins text parts; with images, they become a list of parts for a `Conversation`."""

    def _content(self, parts: list[Any]) -> Any:
        return joined(getattr(part, "part", None) or text_part(part.text) for part in parts)


class TextPart(Model):
    """Text, with what clients put beside it."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: Annotated[list[Json] | None, HINT] = None
    logprobs: Annotated[list[Json] | None, HINT] = None
    cache_control: Annotated[Json | None, HINT] = None
    prompt_cache_breakpoint: Annotated[Json | None, HINT] = None


class RefusalPart(Model):
    """Text with which the assistant refused."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Content = Annotated[str, Joined(TextPart, RefusalPart)]


def _prompts(prompt: object) -> list[str | list[int]]:
    """One prompt or several, as a list of prompts."""
    if isinstance(prompt, str) or _is_token_ids(prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt and (_are_texts(prompt) or all(map(_is_token_ids, prompt))):
        return prompt
    raise PydanticCustomError(
        "prompt", "must be a string, a list of strings, a list of token ids or a list of such lists"
    )


def _are_texts(prompts: list[object]) -> bool:
    return all(isinstance(prompt, str) for prompt in prompts)


def _is_token_ids(prompt: object) -> TypeGuard[list[int]]:
    return isinstance(prompt, list) and bool(prompt) and all(type(token_id) is int for token_id in prompt)


_TOKEN_IDS_SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_PROMPTS_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _TOKEN_IDS_SCHEMA,
        {"type": "array", "items": _TOKEN_IDS_SCHEMA, "minItems": 1},
    ]
}

Prompts = Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPTS_SCHEMA)]


def given(fields: Mapping[str, Any]) -> Json:
    """Drop the fields that are null."""
    return {name: value for name, value in fields.items() if value is not None}
