"""Groups of options as dataclasses: a field is stated once, as the command line's option and as its value."""

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def given(group: Any) -> dict[str, Any]:
    """Return `option -> value` of the fields that differ from their defaults: `{"--rate": [1.0]}`."""
    types = get_type_hints(type(group), include_extras=True)
    return {
        _option(field.name, types[field.name]): getattr(group, field.name)
        for field in fields(group)
        if getattr(group, field.name) != field.default
    }


def _option(name: str, annotation: Any) -> str:
    """A long name that is stated comes first; else it is the field's."""
    (info,) = annotation.__metadata__
    stated = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
    return next((each for each in stated if each.startswith("--")), f"--{name.replace('_', '-')}")


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Make a typer command of a function that takes dataclasses.

    Every field of such a dataclass becomes an option: `Annotated[type, typer.Option(...)]` with a default.
    Parameters of other types stay what they are.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hints[name] for name in signature(command).parameters if is_dataclass(hints[name])}
    flags: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        group = groups.get(parameter.name)
        if group is None:
            flags.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[parameter.name]))
            continue
        types = get_type_hints(group, include_extras=True)
        for field in fields(group):
            default = Parameter.empty if field.default is MISSING else field.default
            flags.append(
                Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=types[field.name])
            )

    def flat(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__annotations__ = {}
    flat.__signature__ = Signature(flags)  # type: ignore[attr-defined]  # what inspect.signature looks for
    return flat
