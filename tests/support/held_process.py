"""A program in a process of its own, which tests lead by lines and kill."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).parent.parent


class HeldProcess:
    """It obeys lines on its stdin, and has its stdout read line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def tell(self, line: str) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def read_line(self) -> str:
        """Wait for its next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """Kill it in the middle of whatever it does."""
        self.process.kill()
        self.process.wait(30)


@contextmanager
def held_process(program: str, **fields: object) -> Iterator[HeldProcess]:
    """Run a program, which is killed in the end.

    Args:
        program: its source, in which {tests!r} stands for the folder of all tests.
        fields: what other names in braces stand for.
    """
    source = textwrap.dedent(program).format(tests=str(TESTS), **fields)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-P", "-c", source], stdin=pipe, stdout=pipe, text=True
    ) as process:
        try:
            yield HeldProcess(process)
        finally:
            process.kill()
