"""Trial compilation of grammars in a separate process.

llguidance limits the cost of a grammar, but not everywhere. A chain of some thousand definitions overflows
the stack, which would crash the server, and some expressions take minutes and gigabytes to compile.

This file is also the program of that process: it imports none of our modules, so it starts quickly.
"""

import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:  # as in grammar.py
    from llguidance import LLParserLimits, LLTokenizer

MAX_S = 3.0
MAX_MEMORY_BYTES = 2 << 30  # of address space, which bounds all memory
STACK_BYTES = 1 << 20  # server threads have more, so a grammar that passes is safe for them

# Limits per token: milliseconds, and some 80 MB in all. The library's own limits are about twice as high; a
# text made to reach them would delay every request. A character of a string with bounded length takes some
# ten states; other strings take none.


def limits() -> "LLParserLimits":
    """Return the limits on a grammar's cost."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=150_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class GrammarTrial:
    """Tries grammars, one at a time; thread-safe."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def is_harmless(self, grammar: str) -> bool:
        """Return False if compiling exceeds the time or memory limit; an invalid grammar is harmless."""
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    encoding="ascii",
                )
            incoming, outgoing = _pipes(self._process)
            with contextlib.suppress(BrokenPipeError):
                incoming.write(json.dumps(grammar) + "\n")
                incoming.flush()
            if outgoing.readline():
                return True
            self._end()
            return False

    def close(self) -> None:
        """Stop the process; the next trial starts a new one."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for pipe in _pipes(process):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
            process.wait()


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


# Code of the trial process.


def main() -> None:
    """Answer each line, a grammar in JSON, with one line, until a trial fails."""
    with contextlib.suppress(ValueError, OSError):  # a lower limit already applies
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from llguidance import LLTokenizer

    tokenizer = LLTokenizer("byte")
    for line in sys.stdin:
        # llguidance releases the GIL while it works.
        alarm = threading.Timer(MAX_S, os._exit, (1,))
        alarm.start()
        threading.stack_size(STACK_BYTES)
        trial = threading.Thread(target=_try, args=(tokenizer, json.loads(line)))
        trial.start()
        trial.join()
        alarm.cancel()
        print("tried", flush=True)


def _try(tokenizer: "LLTokenizer", grammar: str) -> None:
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()


if __name__ == "__main__":
    main()
