"""The treatment of every field of the API's bodies, read from their models and tables."""

import types
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import PlainValidator

from neo_desktop.app.api.fields import (
    ABSENT,
    DEFAULTS,
    HINTS,
    LEFT_OUT,
    SYNONYMS,
    Model,
    Tagged,
    literals,
    tagged_models,
)


class Kind(StrEnum):
    HONOURED = "honoured"
    LEFT_OUT = "left out"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Entry:
    """One field, or one type of a part, in the table."""

    kind: Kind
    is_open: bool = False  # it is treated as a whole, with all its members


# Fields that any object of a body may have.
ANYWHERE = HINTS | LEFT_OUT.keys() | ABSENT | DEFAULTS.keys() | SYNONYMS.keys()


def table(model: type[Model]) -> dict[str, Entry]:
    """Map all declared fields of a body, like `messages[].content[]<text>.text`, to their treatment."""
    entries: dict[str, Entry] = {}
    _enter_fields(entries, "", model)
    return entries


def _enter_fields(entries: dict[str, Entry], path: str, model: type[Model]) -> None:
    for name, field in model.model_fields.items():
        place = f"{path}.{field.alias or name}".lstrip(".")
        entries.setdefault(place, Entry(Kind.HONOURED))
        annotation: Any = field.annotation
        _enter(entries, place, Annotated[annotation, *field.metadata] if field.metadata else annotation)


def _enter(entries: dict[str, Entry], path: str, annotation: Any) -> None:
    kind, args = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        for mark in args[1:]:
            if isinstance(mark, Tagged):
                _enter_union(entries, path, mark, args[0])
                return
            inner: Any = (
                getattr(mark, "json_schema_input_type", None) if isinstance(mark, PlainValidator) else None
            )
            if inner not in (None, Any):
                _enter(entries, path, inner)
                return
        _enter(entries, path, args[0])
    elif kind in (Union, types.UnionType):
        for each in args:
            _enter(entries, path, each)
    elif kind is list:
        _enter(entries, f"{path}[]", args[0])
    elif kind is dict or annotation is Any:
        entries[path] = replace(entries.get(path, Entry(Kind.HONOURED)), is_open=True)
    elif isinstance(annotation, type) and issubclass(annotation, Model):
        if "type" in annotation.model_fields:
            tags = literals(annotation.model_fields["type"].annotation)
            entries |= {f"{path}<{tag}>": Entry(Kind.HONOURED) for tag in tags}
        _enter_fields(entries, path, annotation)


def _enter_union(entries: dict[str, Entry], path: str, union: Tagged, annotation: Any) -> None:
    for sentences, kind in ((union.refused, Kind.REFUSED), (union.left_out, Kind.LEFT_OUT)):
        entries |= {f"{path}<{name}>": Entry(kind, is_open=True) for name in sentences}
    for tag, model in tagged_models(annotation).items():
        entries[f"{path}<{tag}>"] = Entry(Kind.HONOURED)
        _enter_fields(entries, f"{path}<{tag}>", model)
