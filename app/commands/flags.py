"""Groups of options as dataclasses: a field is stated once, as the command line's option and as its value."""

import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer

from neo_desktop.engine.options import OPTIONS, Option

_NAMES = re.compile(
    rf"(?<![\w/.-])({'|'.join(name for name, option in OPTIONS.items() if option.flag)})(?![\w/.'-])"
)
WIDEST_CHOICES = 18  # characters: the column of `--help` would cut more


class Without:
    """Fields of a group that a command does not offer: `Annotated[EngineOptions, Without("policy")]`."""

    def __init__(self, *names: str) -> None:
        self.names = names


def flag(option: Option, kind: Any) -> Any:
    """Return typer's form of one of the engine's options, for values of this type."""
    # Choices that are registered elsewhere are checked when the options are made.
    values = Literal[option.fixed_choices] if option.fixed_choices else kind
    text, metavar = option.help, option.metavar
    if len("|".join(option.fixed_choices)) > WIDEST_CHOICES:
        metavar = "NAME"
        text += f" One of: {', '.join(option.fixed_choices)}."
    said = typer.Option(
        option.flag, help=text, metavar=metavar, min=option.least, rich_help_panel=option.panel
    )
    return Annotated[values, said]


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Make a typer command of a function that takes dataclasses.

    A field of a dataclass becomes an option: `Annotated[type, typer.Option(...)]` with a default, or
    `Annotated[type, Option(...)]`. Fields of `EngineOptions` have their options in `OPTIONS`. A field may be
    a dataclass itself. Parameters of other types stay what they are.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    flags: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        hint = hints[parameter.name]
        if _group(hint) is None:
            flags.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hint))
        else:
            groups[parameter.name] = hint
            flags.extend(_flags(hint))

    def flat(**values: Any) -> None:
        try:
            for name, hint in groups.items():
                values[name] = _filled(hint, values)
        except ValueError as error:
            raise typer.BadParameter(_with_flags(str(error))) from None
        command(**values)

    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__annotations__ = {}
    flat.__signature__ = Signature(flags)  # type: ignore[attr-defined]  # what inspect.signature looks for
    return flat


def _with_flags(message: str) -> str:
    """Return an error of `EngineOptions` with flags in place of the names of options."""
    return _NAMES.sub(lambda found: str(OPTIONS[found[0]].flag), message)


def _group(hint: Any) -> Any:
    """Return the dataclass that a hint is of; None: it is of none."""
    kind = get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
    return kind if is_dataclass(kind) else None


def _offered(hint: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the fields of a group that are on the command line, and their hints."""
    group = _group(hint)
    left_out = {name for each in getattr(hint, "__metadata__", ()) for name in each.names}
    types = get_type_hints(group, include_extras=True)
    for field in fields(group):
        annotation = types[field.name]
        said, kind = next(iter(getattr(annotation, "__metadata__", ())), None), get_args(annotation)[:1]
        if "option" in field.metadata:
            said, kind = OPTIONS[field.name], (annotation,)
        if field.name in left_out:
            continue
        if not isinstance(said, Option):
            if said is not None or _group(annotation) is not None:
                yield field, annotation
        elif said.flag is not None:
            yield field, flag(said, *kind)


def _flags(hint: Any) -> Iterator[Parameter]:
    for field, annotation in _offered(hint):
        if _group(annotation) is not None:
            yield from _flags(annotation)
        else:
            default = Parameter.empty if field.default is MISSING else field.default
            yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _filled(hint: Any, values: dict[str, Any]) -> Any:
    """Make a group of what was given, and take that out of the values."""
    return _group(hint)(
        **{
            field.name: values.pop(field.name) if _group(annotation) is None else _filled(annotation, values)
            for field, annotation in _offered(hint)
        }
    )
