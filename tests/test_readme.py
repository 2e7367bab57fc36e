"""The commands in the README and the users' pages run, and links have targets."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import typer

from neo_desktop.app.cli import app, with_command

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("install", "models", "offloading", "api", "faq")),
]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
LINES = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
    if shlex.split(line, comments=True)
]
INLINE = [
    shlex.split(text.replace("\n", " "))
    for text in re.findall(r"`((?:neo-desktop|\./scripts/|\.venv/bin/|scripts/)[^`]*)`", TEXT)
]
NAMED = {"NAME": "neo-desktop-guide", "N": "1", "ARGUMENTS": "info", "FILE": "a-file"}


def arguments_of(words: list[str]) -> list[str] | None:
    """Return the program's arguments, or None for another program."""
    program, *arguments = [NAMED.get(word, word) for word in words]
    is_ours = program in ("neo-desktop", ".venv/bin/neo-desktop", "./scripts/start")
    return with_command(arguments) if is_ours else None


COMMANDS = [arguments for words in [*LINES, *INLINE] if (arguments := arguments_of(words)) is not None]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_printed_command_is_one_of_the_program(arguments: list[str]) -> None:
    command: click.Command = typer.main.get_command(app)
    context = click.Context(command)
    while isinstance(command, click.Group):
        if not arguments:  # `neo-desktop models` shows its own list
            assert command.invoke_without_command
            return
        name, command, arguments = command.resolve_command(context, arguments)
        assert command is not None, name
    command.make_context(command.name, list(arguments))


@pytest.mark.parametrize("words", [words for words in LINES if words[0] == "neo-desktop"] or [None])
def test_no_printed_line_needs_a_program_on_the_path(words: list[str] | None) -> None:
    assert words is None, "./scripts/start puts nothing on the PATH"


@pytest.mark.parametrize("words", [*LINES, *INLINE], ids=" ".join)
def test_scripts_and_extras_that_are_printed_exist(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in words:
        for extra in re.findall(r"^\.\[(.*)\]$", word):
            assert extra in extras["optional-dependencies"]
        if re.fullmatch(r"(\./)?scripts/[\w.]+", word):
            assert (ROOT / word).is_file()
            assert word.endswith(".py") or os.access(ROOT / word, os.X_OK)
        if re.fullmatch(r"scripts\.\w+", word):
            assert (ROOT / f"{word.replace('.', '/')}.py").is_file()


@pytest.mark.parametrize("arguments", [["info"], ["models"], ["models", "info", "neo-desktop-guide"]])
def test_commands_that_need_no_network_run(arguments: list[str], tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("neo-desktop")
    places = {"NEO_DESKTOP_DATA": tmp_path, "NEO_DESKTOP_CACHE": tmp_path}
    environment = os.environ | {name: str(path) for name, path in places.items()}
    run = subprocess.run([program, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert arguments in COMMANDS or arguments[:2] == ["models", "info"]


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name
)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target
