"""Reading ahead: a whole file is requested once, in order, before the reader needs it."""

import os
from pathlib import Path

import pytest

from neo_desktop.models import read_ahead
from neo_desktop.models.read_ahead import ReadAhead


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system reads ahead as it sees fit")
def test_what_comes_next_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(read_ahead, "READ_AHEAD_BYTES", 300)
    monkeypatch.setattr(read_ahead, "_ASKED_BYTES", 100)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, first, count, advice: asked.append((first, count)))
    ahead = ReadAhead(path)
    for position in (0, 10, 150, 140, 400, 690, 950):
        ahead.at(position)
        assert sum(count for _, count in asked) >= min(position + 300, 1000)
    assert asked == [(first, 100) for first in range(0, 1000, 100)]


def test_where_the_system_cannot_be_told_nothing_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    (tmp_path / "file").write_bytes(bytes(1000))
    ReadAhead(tmp_path / "file").at(0)
