"""The sentences of suites and page: paragraphs of templates in `texts`, with figures in their places.

Paragraphs are separated by empty lines. Lines of one are joined by spaces, before punctuation by nothing, so
that conditions can stand on lines of their own. Floats get about three digits.
"""

import re
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from neo_desktop.app.words import binary_size, duration, number


def say(text: str, **figures: object) -> tuple[str, ...]:
    """Return the paragraphs of the template of this name, filled in."""
    said = _environment().get_template(f"{text}.txt").render(figures)
    said = re.sub(r"\s*\n\s*(?=[.,;:)])", "", said)
    return tuple(
        re.sub(r"\s*\n\s*", " ", each.strip()) for each in re.split(r"\n\s*\n", said) if each.strip()
    )


def many(count: int, thing: str) -> str:
    """Return "1 thread", "2 threads"."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def no_gpu(note: str) -> str:
    """Say in a sentence why there is no GPU; the libraries' words in `note` are for details."""
    if note.startswith("no NVIDIA driver") or note.endswith("lists no GPU"):
        return "No NVIDIA GPU was found"
    return note[:1].upper() + note[1:] if note else "The CPU was asked for"


def _printed(value: object) -> object:
    """Values have one line: an error's text may hold more."""
    if isinstance(value, float):
        return number(value)
    return " ".join(value.splitlines()) if isinstance(value, str) else value


@cache
def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "texts"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printed,
        autoescape=False,
    )
    found.filters |= {"format": format, "many": many, "size": binary_size, "duration": duration}
    found.filters |= {"no_gpu": no_gpu}
    return found
