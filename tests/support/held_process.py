"""A program in its own process, controlled by lines and killed by tests."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).parent.parent


class HeldProcess:
    """A process that takes commands on stdin and answers on stdout, line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def read_line(self) -> str:
        """Wait for the next line of its stdout."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """Kill the process at any point of its work."""
        self.process.kill()
        self.process.wait(30)


@contextmanager
def held_process(program: str, **fields: object) -> Iterator[HeldProcess]:
    """Run a program, and kill it at the end.

    Args:
        program: source text, with {tests!r} in place of the tests folder.
        fields: values of the other names in braces.
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
