"""The table of fields, against the published types of OpenAI and Anthropic, and against any JSON."""

import json
import re
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Union, get_args, get_origin

import anthropic.types
import anthropic.types.beta
import pytest
import typing_extensions
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens
from anthropic.types.beta import message_create_params as beta_messages
from field_table import ANYWHERE, Entry, table
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import ValidationError

from neo_desktop.app.api.chat import ChatCompletionRequest
from neo_desktop.app.api.completions import CompletionRequest
from neo_desktop.app.api.embeddings import EmbeddingRequest
from neo_desktop.app.api.fields import HINTS, Model, names
from neo_desktop.app.api.messages import CountTokensRequest, MessagesRequest
from neo_desktop.app.api.response_items import ResponseTools
from neo_desktop.app.api.responses import ResponsesRequest
from neo_desktop.app.errors import ApiError
from neo_desktop.app.web.errors import from_validation
from neo_desktop.engine.errors import SettingError
from neo_desktop.models.config import GenerationDefaults

PUBLISHED: list[tuple[type[Model], Any]] = [
    (ChatCompletionRequest, chat_create_params.CompletionCreateParamsStreaming),
    (CompletionRequest, completion_create_params.CompletionCreateParamsStreaming),
    (EmbeddingRequest, embedding_create_params.EmbeddingCreateParams),
    (ResponsesRequest, response_create_params.ResponseCreateParamsStreaming),
    (MessagesRequest, anthropic.types.message_create_params.MessageCreateParamsStreaming),
    (MessagesRequest, beta_messages.MessageCreateParamsStreaming),
    (CountTokensRequest, anthropic.types.message_count_tokens_params.MessageCountTokensParams),
    (CountTokensRequest, beta_count_tokens.MessageCountTokensParams),
]


def literals(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [value for value in get_args(annotation) if isinstance(value, str)]
    return [value for part in get_args(annotation) for value in literals(part)]


def parts(annotation: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a field may hold, each with the brackets of its enclosing lists."""
    origin, args = get_origin(annotation), get_args(annotation)
    if typing_extensions.is_typeddict(annotation):
        yield "", annotation
    elif origin in (Union, types.UnionType, typing_extensions.Required, typing_extensions.NotRequired):
        for part in args:
            yield from parts(part)
    elif origin is typing.Annotated:
        yield from parts(args[0])
    elif args and origin is not dict:
        yield from ((f"[]{brackets}", part) for brackets, part in parts(args[0]))


def missing(
    entries: dict[str, Entry], published: Any, places: frozenset[str] = frozenset({""}), above: Any = ()
) -> Iterator[str]:
    """Yield fields and part types without an entry; `places` are this part's possible keys in the table."""
    for name, annotation in typing_extensions.get_type_hints(published).items():
        fields = {f"{place}.{name}".lstrip(".") for place in places}
        known = fields & entries.keys()
        if name in ANYWHERE and not known:
            continue
        if not known:
            yield f"{min(places)}.{name}"
        if not known or any(entries[field].is_open for field in known):
            continue
        for brackets, part in parts(annotation):
            if part in above:
                continue
            plain = frozenset(field + brackets for field in known)
            for kind in literals(typing_extensions.get_type_hints(part).get("type")) or [""]:
                tagged = {place: entry_of(entries, f"{place}<{kind}>") for place in plain} if kind else {}
                if kind and not any(tagged.values()):
                    yield f"{min(plain)}<{kind}>"
                elif not any(entry and entry.is_open for entry in tagged.values()):
                    inside = plain | {f"{place}<{kind}>" for place in tagged}
                    yield from missing(entries, part, inside, (*above, part))


def entry_of(entries: dict[str, Entry], place: str) -> Entry | None:
    """Return the entry of a type, or of a wildcard `prefix*` for the type."""
    start = place.rfind("<") + 1
    beginnings = (place[:length] + "*>" for length in range(len(place) - 1, start, -1))
    return next((entries[one] for one in (place, *beginnings) if one in entries), None)


@pytest.mark.parametrize(("model", "published"), PUBLISHED)
def test_every_published_field_is_in_the_table(model: type[Model], published: Any) -> None:
    assert list(missing(table(model), published)) == []


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

TEXT_PART = {"type": "text", "text": "x"}
REGEX = {"type": "grammar", "syntax": "regex", "definition": "a+"}

PIXEL = (  # a PNG file
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNgYGAAAAAEAAH2FzhVAAAAAElFTkSuQmCC"
)
PIXEL_URL = f"data:image/png;base64,{PIXEL}"

# One body per protocol, with a part of every accepted type.
BODIES: dict[type[Model], dict[str, Any]] = {
    ChatCompletionRequest: {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "s"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "u"}], "name": "n"},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL_URL}}]},
            {"role": "user", "content": [{"type": "input_image", "image_url": PIXEL_URL}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "output_text", "text": "t"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": FORM,
        "stream_options": {"include_usage": True},
        "logit_bias": {"1": 1},
        "stop": ["x"],
        "max_tokens": 5,
        "prediction": {
            "type": "content",
            "content": [{"type": "text", "text": "t"}, {"type": "output_text", "text": "t"}],
        },
    },
    CompletionRequest: {"prompt": ["a"], "stream_options": {"include_usage": True}, "response_format": FORM},
    EmbeddingRequest: {"input": ["a"]},
    ResponsesRequest: {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "message", "role": "user", "content": [{"type": "text", "text": "u"}]},
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": PIXEL_URL},
                    {"type": "image_url", "image_url": {"url": PIXEL_URL}},
                ],
            },
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "namespace": "n"},
            {
                "type": "function_call_output",
                "call_id": "1",
                "output": [{"type": "output_text", "text": "t"}],
            },
            {"type": "custom_tool_call", "call_id": "2", "name": "c", "input": "i"},
            {
                "type": "custom_tool_call_output",
                "call_id": "2",
                "output": [{"type": "refusal", "refusal": "t"}],
            },
        ],
        "instructions": "i",
        "tools": [
            {"type": "function", **FUNCTION},
            {"type": "custom", "name": "c", "format": REGEX},
            {"type": "custom", "name": "d", "format": {"type": "text"}},
            {
                "type": "namespace",
                "name": "n",
                "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "c"}],
            },
        ],
        "tool_choice": {"type": "custom", "name": "c"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        "reasoning": {"effort": "low"},
    },
    MessagesRequest: {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": PIXEL},
                    },
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": ""},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "1",
                        "content": [
                            {"type": "text", "text": "r"},
                            {"type": "tool_reference", "tool_name": "f"},
                            {"type": "search_result", "source": "s", "title": "t", "content": [TEXT_PART]},
                        ],
                    },
                    {"type": "search_result", "source": "s", "title": "t", "content": [TEXT_PART]},
                ],
            },
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, "type": "custom"}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled"},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"},
        "stop_sequences": ["x"],
    },
}
COUNTED = ("max_tokens", "stop_sequences")
BODIES[CountTokensRequest] = {
    name: value for name, value in BODIES[MessagesRequest].items() if name not in COUNTED
}
DEFAULTS = GenerationDefaults()


def meaning(model: type[Model], body: dict[str, Any]) -> Any:
    """Return the engine's view of a body: sampling parameters and prompt or conversation."""
    parsed: Any = model.model_validate_json(json.dumps(body))
    asked = [] if model in (CountTokensRequest, EmbeddingRequest) else [parsed.sampling_params(DEFAULTS)]
    if isinstance(parsed, ResponsesRequest):
        return [*asked, parsed.conversation_of(parsed.input, ResponseTools(parsed.tools or ()), None)]
    if model in (CompletionRequest, EmbeddingRequest):
        return [*asked, getattr(parsed, "prompt", None) or parsed.input]
    return [*asked, parsed.conversation(None)]


def subclasses(kind: type[Model]) -> Iterable[type[Model]]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


@pytest.mark.parametrize("model", BODIES)
def test_hints_change_nothing(model: type[Model]) -> None:
    body = BODIES[model]
    plain = meaning(model, body)
    for place in objects(model):
        part = at(body, place)
        declared = names(model).union(*map(names, subclasses(Model)))
        changed = {name: {"any": "thing"} for name in HINTS - declared} | part
        assert meaning(model, replaced(body, place, changed)) == plain, place


@pytest.mark.parametrize("model", BODIES)
@pytest.mark.parametrize(
    ("name", "harmless", "refused"), [("audio", {}, {"voice": "x"}), ("mode", "standard", "x")]
)
def test_a_feature_that_is_not_there_is_refused_unless_it_is_not_asked_for(
    model: type[Model], name: str, harmless: Any, refused: Any
) -> None:
    body = BODIES[model]
    for place in objects(model):
        part = at(body, place)
        for value in (None, harmless):
            assert meaning(model, replaced(body, place, part | {name: value})) == meaning(model, body)
        with pytest.raises(ValidationError) as refusal:
            meaning(model, replaced(body, place, part | {name: refused}))
        assert from_validation(refusal.value).message.endswith(
            f"{name} is not supported by this server; leave it out"
        )


def objects(model: type[Model]) -> Iterator[tuple[Any, ...]]:
    """Yield the places of a body whose fields are the protocol's own."""
    body, entries = BODIES[model], table(model)
    for place in [(), *places(body)]:
        name = "".join("[]" if isinstance(key, int) else f".{key}" for key in place).lstrip(".")
        is_open = any(entry.is_open for path, entry in entries.items() if untyped(path) == name)
        is_inside = name.startswith("logit_bias") or "schema" in name or "parameters" in name
        if isinstance(at(body, place), dict) and not is_open and not is_inside:
            yield place


def at(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


def untyped(path: str) -> str:
    return re.sub("<[^>]*>", "", path)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "role", "name", "id"]) | st.text(max_size=5), inner, max_size=3
        )
    ),
    max_leaves=6,
)
# Words of pydantic and Python, and class names.
NOT_A_SENTENCE = re.compile(
    r"tag '|found using|Input |Value error|pydantic|Traceback|Error\b|instance of|NoneType|<class|\n|"
    + "|".join(
        rf"\b{kind.__name__}\b" for kind in subclasses(Model) if re.search("[a-z][A-Z]", kind.__name__)
    )
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield (*path, key)
        yield from places(part, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("model", BODIES)
@given(data=st.data())
def test_any_json_in_place_of_a_field_is_taken_or_refused_in_a_sentence_that_names_it(
    model: type[Model], data: st.DataObject
) -> None:
    body = BODIES[model]
    known = [entry for entry in table(model) if not re.search(r"[.\[<]", entry)]
    place = data.draw(st.sampled_from([*places(body), *((name,) for name in known)]))
    value = data.draw(
        JSON | st.sampled_from([{"type": "image", "source": {}}, [{"type": "input_audio"}], "x" * 300])
    )
    changed = body | {place[0]: value} if len(place) == 1 else replaced(body, place, value)
    try:
        meaning(model, changed)
    except ValidationError as error:
        refusal = from_validation(error)
        assert refusal.param is not None
        assert refusal.message.startswith(refusal.param)
        assert refusal.param.split(".")[0].split("[")[0] == place[0]
        said = refusal.message
    except (ApiError, SettingError) as error:
        said = str(error)
    else:
        return
    assert not NOT_A_SENTENCE.search(said), said
    assert len(said) < 700, said


@pytest.mark.parametrize("model", BODIES)
def test_an_unknown_field_is_named_wherever_it_stands(model: type[Model]) -> None:
    body = BODIES[model]
    for place in objects(model):
        part = at(body, place)
        with pytest.raises(ValidationError) as refused:
            meaning(model, replaced(body, place, part | {"nonsense": 1}))
        assert from_validation(refused.value).message.endswith(
            "is not a field that this server knows; leave it out"
        )
