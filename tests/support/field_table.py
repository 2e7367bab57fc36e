"""The treatment of every field of the API's bodies, read from their models."""

import types
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, Union, get_args, get_origin

from neo_desktop.app.api.fields import HINT, Joined, LeftOut, Model, Only, Tagged, in_marks, tags


class Kind(StrEnum):
    HONOURED = "honoured"
    HINT = "hint"
    LEFT_OUT = "left out"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Entry:
    """One field, or one type of a part, in the table."""

    kind: Kind
    is_open: bool = False  # it is treated as a whole, with all its members
    annotation: Any = None  # of a hint: what it may be


def table(model: type[Model]) -> dict[str, Entry]:
    """Map all fields of a body, like `messages[].content[]<text>.cache_control`, to their treatment."""
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
            if (found := _kind(mark)) is not None:
                entries[path] = Entry(found, is_open=True, annotation=args[0])
                return
            if isinstance(mark, Tagged | Joined):
                union, place = (mark, path) if isinstance(mark, Tagged) else (mark.union, f"{path}[]")
                _enter_union(entries, place, union)
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
            entries |= {path + in_marks(tag): Entry(Kind.HONOURED) for tag in tags(annotation)}
        _enter_fields(entries, path, annotation)


def _enter_union(entries: dict[str, Entry], path: str, union: Tagged) -> None:
    for sentences, kind in ((union.refused, Kind.REFUSED), (union.left_out, Kind.LEFT_OUT)):
        entries |= {path + in_marks(name): Entry(kind, is_open=True) for name in sentences}
    for tag, model in union.models.items():
        entries[path + in_marks(tag)] = Entry(Kind.HONOURED)
        _enter_fields(entries, path + in_marks(tag), model)


def _kind(mark: object) -> Kind | None:
    if mark is HINT:
        return Kind.HINT
    return Kind.REFUSED if isinstance(mark, Only) else Kind.LEFT_OUT if isinstance(mark, LeftOut) else None
