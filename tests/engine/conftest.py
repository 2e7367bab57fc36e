"""Small random checkpoints, and the secret of workers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import Checkpoints
from workers import SECRET

from neo_desktop import Engine


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Checkpoints(tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def llama(checkpoints: dict[str, Path]) -> Iterator[Engine]:
    with Engine.from_pretrained(checkpoints["llama"], device="cpu") as engine:
        yield engine


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    return path
