"""Options declared as dataclasses: the command line shows and fills them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from neo_desktop.app.cli import app as program
from neo_desktop.app.commands.flags import flag_of, given, with_flags


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


def test_what_was_given_is_known_by_its_option() -> None:
    assert given(Place()) == {}
    place = Place("there", 5, [1.0])
    assert given(place) == {"host": "there", "most_bytes": 5, "rates": [1.0]}
    assert [flag_of(place, name) for name in given(place)] == ["--host", "--most-bytes", "--rate"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--gpu-memory", "0"], "0 is out of range: give at least 0.001 GiB"),
        (["serve", "--port", "99999"], "99999 is out of range: give at most 65535"),
        (["serve", "--port", "abc"], "'abc' is not a whole number"),
        (["serve", "--cpu-cache-tokens", "-1"], "-1 is out of range: give at least 0 tokens"),
        (["serve", "--policy", "fast"], "policy 'fast' is unknown; choose one of: gpu-only"),
        (["serve", "--device", "tpu"], "'tpu' is not one of 'auto', 'cpu', 'cuda'"),
        (["bench", "--rate", "0"], "0 is out of range: give at least 0.01 requests per second"),
        (["simulate"], "for --gpu: name a GPU"),
    ],
)
def test_wrong_values_are_explained_in_words_of_this_program(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(program, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert said in result.output
    assert "Input should" not in result.output
    assert "Value error" not in result.output
