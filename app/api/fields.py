"""What the bodies of all endpoints are made of.

No field is ignored silently. A field is either used, or says nothing about the answer (`user`), or accepted
only with values that change nothing (`store=False`); anything else is an error that names the field.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeGuard

from pydantic import (
    BaseModel,
    BeforeValidator,
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


def described(what: str) -> WrapValidator:
    """One sentence in place of one error per alternative of a union."""

    def check(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("type", "must be {what}", {"what": what}) from None

    return WrapValidator(check)


def _joined_text(content: object) -> object:
    """Text parts as one text, a line each."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            message = "must be text or text parts, got a part of type {kind}: this server reads text only"
            raise PydanticCustomError("content_part", message, {"kind": repr(kind)})
        texts.append(part["text"])
    return "\n".join(texts)


TEXT_PARTS = ("text", "input_text", "output_text")
_TEXT_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"enum": list(TEXT_PARTS)}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART_SCHEMA}]}

Content = Annotated[str, BeforeValidator(_joined_text), WithJsonSchema(_CONTENT_SCHEMA)]


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

Unsupported = Annotated[Any, Only()]


def given(fields: Mapping[str, Any]) -> Json:
    """The fields that are there: null counts as left out."""
    return {name: value for name, value in fields.items() if value is not None}
