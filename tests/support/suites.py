"""Suites in tests: run to the end, shown as in a terminal, drawn."""

from collections.abc import Iterable
from io import BytesIO, StringIO
from typing import TypeVar

import numpy as np
from matplotlib import image
from numpy.typing import NDArray
from rich.console import Console

from neo_desktop.app.bench.page.pictures import picture
from neo_desktop.app.bench.page.terminal import render_section
from neo_desktop.app.bench.section import Plot, Section

T = TypeVar("T")


def ignore(share: float, what: str) -> None:
    """Progress that nobody wants to see."""


def last(reports: Iterable[T]) -> T:
    """Run a suite to its end."""
    *_, report = reports
    return report


def shown(section: Section, width: int = 80) -> str:
    """What a terminal of that width shows."""
    console = Console(width=width, record=True, file=StringIO())
    console.print(render_section(section))
    return console.export_text()


def drawn(plot: Plot) -> NDArray[np.float32]:
    """The picture's pixels, [height, width, 3], from 0 to 1; nothing in it may be cut off."""
    image_: NDArray[np.float32] = image.imread(BytesIO(picture(plot)))
    pixels = image_[:, :, :3]
    for border in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert (border == 1).all(), f"something in {plot.name} reaches beyond the picture"
    return pixels


def count_colour(pixels: NDArray[np.float32], colour: str) -> int:
    """How many pixels have about this colour, "#rrggbb"."""
    wanted = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return int((np.abs(pixels - wanted).max(axis=2) < 0.02).sum())
