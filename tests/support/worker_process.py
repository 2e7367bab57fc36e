"""Attention workers in their own processes, to kill and stop."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from neo_desktop.engine.remote.link import Address


class WorkerProcess:
    """A `neo-desktop worker` process.

    Args:
        secret: file with the secret.
        port: port to listen on; 0: any free one.
    """

    def __init__(
        self,
        secret: Path,
        port: int = 0,
    ) -> None:
        command = (sys.executable, "-m", "neo_desktop.app.entry", "worker", "--listen", f"127.0.0.1:{port}")
        options = ("--memory", "0.02", "--worker-secret", str(secret), "--threads", "1")
        self._process = subprocess.Popen(
            (*command, *options),
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"COLUMNS": "200"},
        )
        assert self._process.stdout is not None
        self.said = ""
        for line in self._process.stdout:
            self.said += line
            if found := re.search(r"Attention worker: (\S+),", line):
                self.address = Address.parse(found[1])
                break
        else:
            raise AssertionError(f"the worker did not start:\n{self.said}")

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait(60)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> int:
        """End the worker; return its exit status."""
        self._signal(signal.SIGTERM)
        assert self._process.stdout is not None
        self.said += self._process.stdout.read()
        return self._process.wait(60)

    def _signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(60)
        if self._process.stdout is not None:
            self._process.stdout.close()
