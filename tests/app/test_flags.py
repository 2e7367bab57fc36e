"""Options that are stated as dataclasses: the command line shows and fills them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from neo_desktop.app.commands.flags import given, with_flags


@dataclass(frozen=True, slots=True)
class Place:
    host: Annotated[str, typer.Option("--host", "-h", help="Where to listen.")] = "here"
    most_bytes: Annotated[int | None, typer.Option(min=1)] = None
    rates: Annotated[list[float] | None, typer.Option("--rate")] = None
    out: Annotated[Path | None, typer.Option(metavar="DIR")] = None


SEEN: list[tuple[Place, bool]] = []


@with_flags
def command(place: Place, loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
    """Say what was given."""
    SEEN.append((place, loud))


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer(add_completion=False)
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100"})
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("arguments", "place", "loud"),
    [
        ((), Place(), False),
        (("-h", "there", "--loud"), Place("there"), True),
        (("--most-bytes", "5", "--rate", "1", "--rate", "2.5"), Place(most_bytes=5, rates=[1.0, 2.5]), False),
        (("--out", "x"), Place(out=Path("x")), False),
    ],
)
def test_the_command_line_fills_the_dataclass(arguments: tuple[str, ...], place: Place, loud: bool) -> None:
    SEEN.clear()
    assert run(*arguments)[0] == 0
    assert [(place, loud)] == SEEN


def test_help_shows_every_field() -> None:
    code, text = run("--help")
    assert code == 0
    for shown in (
        "--host",
        "Where to listen.",
        "--most-bytes",
        "--rate",
        "--out",
        "--loud",
        "Say what was given.",
    ):
        assert shown in text


def test_checks_of_an_option_hold() -> None:
    assert run("--most-bytes", "0")[0] == 2


def test_what_was_given_is_known_by_its_option() -> None:
    assert given(Place()) == {}
    assert given(Place("there", 5, [1.0])) == {"--host": "there", "--most-bytes": 5, "--rate": [1.0]}
