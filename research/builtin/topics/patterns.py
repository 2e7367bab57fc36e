"""A one-line grammar for wordings: `{a|b|}` stands for one of its alternatives, braces may nest."""

import re
from random import Random

_INNERMOST = re.compile(r"\{([^{}]*)\}")


def expand(rng: Random, pattern: str) -> str:
    """Return one random wording of the pattern, with single spaces."""
    while (match := _INNERMOST.search(pattern)) is not None:
        pattern = pattern[: match.start()] + rng.choice(match[1].split("|")) + pattern[match.end() :]
    return " ".join(pattern.split())
