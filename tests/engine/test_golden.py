"""Programs give lanes the recorded stages in the recorded order, and correct tokens."""

import json
from pathlib import Path

import pytest
from golden import KINDS, digest

SEED = 7
GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_stages_and_what_they_wait_for_are_those_on_record(kind: str) -> None:
    """After an intended change, record new digests; `support/golden.py` shows the difference."""
    assert digest(list(KINDS[kind](SEED).records())) == GOLDEN[kind]
