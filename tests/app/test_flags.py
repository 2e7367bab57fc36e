"""Options declared as dataclasses: the command line shows and fills them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from neo_desktop.app.cli import app as program
from neo_desktop.app.commands.flags import Without, with_flags
from neo_desktop.engine.options import OPTIONS, EngineOptions


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


@dataclass(frozen=True, slots=True)
class Nested:
    engine: Annotated[EngineOptions, Without("dtype")]
    place: Place


@with_flags
def nested_command(whole: Nested) -> None:
    """Say what was given."""
    WHOLE.append(whole)


WHOLE: list[Nested] = []


def test_groups_lie_within_groups_and_a_command_leaves_fields_out() -> None:
    app = typer.Typer(add_completion=False)
    app.command()(nested_command)
    WHOLE.clear()
    arguments = ["--device", "cpu", "--gpu-memory", "1.5", "--host", "there"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert [Nested(EngineOptions(device="cpu", gpu_memory_gib=1.5), Place("there"))] == WHOLE
    for wrong in (
        ["--device", "tpu"],
        ["--dtype", "float32"],
        ["--gpu-memory", "0"],
        ["--max-batch-tokens", "1"],
    ):
        assert CliRunner().invoke(app, wrong).exit_code == 2


def test_help_says_what_the_engine_says_of_its_options() -> None:
    app = typer.Typer(add_completion=False)
    app.command()(nested_command)
    text = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "4000"}).output.split())
    for name, option in OPTIONS.items():
        is_offered = option.flag is not None and name != "dtype"
        assert (option.help in text) == is_offered, name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--gpu-memory", "0"], "0 is out of range: give at least 0.001 GiB"),
        (["serve", "--port", "99999"], "99999 is out of range: give at most 65535"),
        (["serve", "--port", "abc"], "'abc' is not a whole number"),
        (["serve", "--cpu-cache-tokens", "-1"], "-1 is out of range: give at least 0 tokens"),
        (["serve", "--policy", "fast"], "--policy 'fast' is unknown; choose one of: gpu-only"),
        (["serve", "--gpu-weights", "1", "--tensor-parallel", "2"], "--gpu-weights does not go with"),
        (["serve", "--trace-timeline", "/nowhere/file"], "--trace-timeline needs the name of a file"),
        (["serve", "--models-dir", "/nowhere"], "'--models-dir': there is no folder /nowhere"),
        (["serve", "--host", "0.0.0.0"], "for --host: the address"),
        (["serve", "--device", "tpu"], "'tpu' is not one of 'auto', 'cpu', 'cuda'"),
        (["bench", "--requests", "0"], "0 is out of range: give at least 1"),
        (["simulate"], "for --gpu: name a GPU"),
    ],
)
def test_wrong_values_are_explained_in_words_of_this_program(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(program, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert said in result.output
    assert "Input should" not in result.output
    assert "Value error" not in result.output
