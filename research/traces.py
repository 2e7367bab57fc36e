"""Traces of requests, read from files: the workload of the simulations."""

import csv
import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from neo_desktop.engine.simulation.workload import WorkloadRequest

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MAX_TOKENS = 2**31 - 1  # per length in a file; anything longer is a mistake
_FORMATS = (
    f"an Azure trace (CSV with the columns {', '.join(AZURE_COLUMNS)}) or a JSON list of "
    '{"prompt": tokens, "max_tokens": tokens}'
)


class WorkloadError(ValueError):
    """A file without a valid workload: a one-line message with the file, the line and the error."""


def load_trace(path: Path) -> list[WorkloadRequest]:
    """Read an Azure CSV (TIMESTAMP, ContextTokens, GeneratedTokens) or a JSON list of requests.

    Arrival times in a CSV count from its first request. The requests of a JSON list of
    `{"prompt": tokens, "max_tokens": tokens}` arrive all at once.

    Raises:
        WorkloadError: the file has neither format, is empty, or has a malformed line.
        OSError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise WorkloadError(f"{path}: not a text file; expected {_FORMATS}") from None
    requests = _from_json(path, text) if text.lstrip()[:1] in ("[", "{") else _from_csv(path, text)
    if not requests:
        raise WorkloadError(f"{path}: the file holds no requests")
    requests.sort(key=lambda request: request.arrival_ms)  # stable: equal times keep the file's order
    start_ms = requests[0].arrival_ms
    return [replace(request, arrival_ms=request.arrival_ms - start_ms) for request in requests]


def _from_csv(path: Path, text: str) -> list[WorkloadRequest]:
    # Line by line: fields in this format have no line breaks, so an open quote spoils only one line.
    rows = enumerate((next(csv.reader([line]), []) for line in text.splitlines()), start=1)
    number, header = next(rows, (1, []))
    names = [name.strip() for name in header]
    missing = [name for name in AZURE_COLUMNS if name not in names]
    if missing:
        raise WorkloadError(f"{path}, line {number}: no column {' or '.join(missing)}; expected {_FORMATS}")
    columns = [names.index(name) for name in AZURE_COLUMNS]
    return list(_csv_requests(path, rows, columns))


def _csv_requests(
    path: Path, rows: Iterable[tuple[int, list[str]]], columns: list[int]
) -> Iterable[WorkloadRequest]:
    first: datetime | None = None
    for number, row in rows:
        if not row:
            continue
        where = f"{path}, line {number}"
        if len(row) <= max(columns):
            raise WorkloadError(f"{where}: {len(row)} fields, but the columns need {max(columns) + 1}")
        stamp, prompt, output = (row[column].strip() for column in columns)
        try:
            moment = datetime.fromisoformat(stamp)
            first = first or moment
            arrival_ms = (moment - first).total_seconds() * 1e3
        except (ValueError, TypeError):  # TypeError: only one of the two names a time zone
            raise WorkloadError(f"{where}: {stamp!r} is not a time like 2023-11-16 18:15:46.680") from None
        yield WorkloadRequest(
            arrival_ms,
            _tokens(where, AZURE_COLUMNS[1], _integer(prompt)),
            _tokens(where, AZURE_COLUMNS[2], _integer(output)),
        )


def _from_json(path: Path, text: str) -> list[WorkloadRequest]:
    """Parse the list element by element, so that errors can name their line."""
    decoder = json.JSONDecoder()
    position = text.index("[") + 1 if text.lstrip().startswith("[") else None
    if position is None:
        raise WorkloadError(f"{path}, line 1: a JSON object, but expected {_FORMATS}")
    requests: list[WorkloadRequest] = []
    while True:
        position = _skip(text, position)
        if text[position : position + 1] == "]" and not requests:
            break
        where = f"{path}, line {_line(text, position)}"
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise WorkloadError(f"{path}, line {error.lineno}: not valid JSON ({error.msg})") from None
        except (ValueError, RecursionError):  # a number of thousands of digits, or unlimited nesting
            raise WorkloadError(f"{where}: not valid JSON") from None
        if not isinstance(value, dict):
            raise WorkloadError(f"{where}: each request must be an object, expected {_FORMATS}")
        prompt, output = (_tokens(where, key, value.get(key)) for key in ("prompt", "max_tokens"))
        requests.append(WorkloadRequest(0.0, prompt, output))
        position = _skip(text, position)
        if text[position : position + 1] == "]":
            break
        if text[position : position + 1] != ",":
            raise WorkloadError(f"{path}, line {_line(text, position)}: expected ',' or ']' after a request")
        position += 1
    rest = _skip(text, position + 1)
    if rest < len(text):
        raise WorkloadError(f"{path}, line {_line(text, rest)}: something follows the end of the list")
    return requests


def _tokens(where: str, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_TOKENS:
        shown = "missing" if value is None else f"{value!r}"
        raise WorkloadError(f"{where}: {name} must be a number of tokens of at least 1, but is {shown}")
    return value


def _integer(text: str) -> int | str:
    """Return the number, or the text itself if it is not a number or too long."""
    return int(text) if text.isdecimal() and len(text) <= len(str(MAX_TOKENS)) else text


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
