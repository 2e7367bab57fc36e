"""Rank 0's handle of another rank's process."""

import contextlib
import signal
import sys
from collections.abc import Mapping
from typing import Any

from neo_desktop.engine.cuda.errors import EngineLostError
from neo_desktop.engine.execute.ranks.members import Beginning
from neo_desktop.engine.frames import ChildProcess

_COMMAND = (  # -P: import nothing from the current folder
    *(sys.executable, "-P", "-c"),
    "from neo_desktop.engine.follower import main; main()",
)


class RankLostError(EngineLostError):
    """Another rank's process has ended or does not answer, so a part of the model is missing."""


class RankProcess(ChildProcess):
    """The process of another rank."""

    def __init__(self, beginning: Beginning, environment: Mapping[str, str]) -> None:
        self.rank = beginning.rank
        super().__init__(_COMMAND, beginning, _show, environment)

    def answer(self, timeout_s: float | None = None) -> Any:
        """Wait for the next value.

        Args:
            timeout_s: None: wait until the process ends.

        Raises:
            RankLostError: The process has ended or timed out.
            Exception: The process failed during set-up, with this error.
        """
        try:
            value = self.receive(timeout_s)
        except TimeoutError:
            raise RankLostError(f"{self} did not answer within {timeout_s:g} s") from None
        if value is None:
            raise RankLostError(f"{self} {self.what_ended() or 'closed its pipe'}")
        return value

    def what_ended(self, timeout_s: float = 0.0) -> str | None:
        """Describe the end of the process; None: it did not end within the timeout."""
        if (status := self.status(timeout_s)) is None:
            return None
        if self.failure is not None:
            return f"failed: {self.failure}"
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-status).name}"
        return f"ended (exit status {status})"

    @property
    def is_cause(self) -> bool:
        """True if a signal or its own error ended the process, which then made the others end."""
        return self.failure is not None or (self.status() or 0) < 0

    def __str__(self) -> str:
        return f"process {self.pid}, which has part {self.rank.number + 1} of the model,"


def _show(line: str) -> None:
    sys.stderr.write(line)
