"""Shared parts of the benchmarks: model options, and the report in the terminal and as JSON."""

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from neo_desktop.app.bench.section import render_section
from neo_desktop.app.commands.terminal import stdout


def progress(share: float, what: str) -> None:
    print(f"{share:.0%} {what}", flush=True)


def show(reports: Iterable[Any], file: Path | None = None) -> Any:
    """Run a benchmark to its end; print its last report and write it to the file."""
    *_, report = reports
    stdout.print(render_section(report.section()), highlight=False)
    if file is not None:
        file.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return report


def model_arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", help="random weights in this shape; default: the built-in model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser
