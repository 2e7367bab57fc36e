"""Report prose that is hard to read: headless docstrings, banned words, long sentences.

`python -m scripts.prose [FILE ...]`; by default all tracked Python, C++ and Markdown files. The exit code is
1 when code breaks the rules. Findings in pages and tests are only reported.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

HEADLESS = re.compile(r"(?i)(what|whether|where|who[ms]?|whose|how|those|that|which|of|as|when|with|see)\b")
BANNED = re.compile(
    r"(?i)\b(nobody|somebody|everybody|anybody|whoever|whomever|whatever|wherever|likewise|for want of"
    r"|(is|are) (told|there)|tells? (what|who|how|that)|such( an?| as)?|so (many|much)|begins? again|goes? on"
    r"|lies?|as it (is|was)|, too|of (it|them|each|all|those|such)\b(?! (the|these|our|its|is|are)\b))\b"
)
MOST_WORDS = 30  # in a sentence
MOST_HEADLESS = 0.01  # of all docstrings
CODE = re.compile(r"^(app|engine|models|native|ui|benchmarks|research|scripts)/.*\.(py|cpp|h)$")
DATA = re.compile(r"builtin/topics/|scripts/prose\.py$")


def python_prose(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, text, is a docstring) of the docstrings and comment blocks of a Python file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or "", True
    block: list[str] = []
    start = end = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            is_alone = not token.line[: token.start[1]].strip()
            if block and not (is_alone and token.start[0] == end + 1):
                yield start, " ".join(block), False
                block = []
            start = start if block else token.start[0]
            block.append(token.string.lstrip("# "))
            end = token.start[0] if is_alone else -1
    if block:
        yield start, " ".join(block), False


def prose(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, text, is a docstring) of a file's prose."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from python_prose(source)
        return
    pattern = r"(?:^[ \t]*//.*\n)+|//.*"
    if path.suffix == ".md":  # paragraphs, without tables and code
        pattern = r"(?:^(?!\s*\|).+\n?)+"
        source = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), source, flags=re.M | re.S)
    for block in re.finditer(pattern, source, flags=re.M):
        text = re.sub(r"^\s*//[/!]? ?", "", block[0], flags=re.M)
        text = re.sub(r"^  +(?=\S)", "    ", text, flags=re.M) if path.suffix != ".md" else text
        yield source.count("\n", 0, block.start()) + 1, text, False


def findings(pieces: Iterable[tuple[int, str, bool]]) -> Iterator[tuple[int, str]]:
    """Yield (line, finding) of the pieces of a file's prose."""
    for line, text, is_docstring in pieces:
        if is_docstring and HEADLESS.match(text):
            yield line, f"headless: {text.splitlines()[0]}"
        plain = re.sub(r"```.*?```|`[^`]*`", "X", text, flags=re.S)
        plain = re.sub(r"\n\n((    .*)?(\n|$))+", "\n\n", plain)  # drawings and commands
        yield from ((line, f"banned: {word[0].lower()}") for word in BANNED.finditer(plain))
        ended = re.sub(r"^\s*([-*#|]|\d+\.) ?(.*)$", r"\2.", plain, flags=re.M)  # an item is a sentence
        for sentence in re.split(r"(?<=[.!?:;])\s+", ended):
            if len(words := sentence.split()) > MOST_WORDS:
                yield line, f"{len(words)} words: {' '.join(words[:12])} …"


def main(names: list[str]) -> int:
    """Print the findings of the files; return 1 if code breaks the rules."""
    if not names:
        listing = ["git", "ls-files", "*.py", "*.cpp", "*.h", "*.md"]
        names = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split()
    num_docstrings = num_headless = num_others = 0
    for name in sorted(name for name in names if not DATA.search(name)):
        pieces = list(prose(Path(name)))
        for line, finding in findings(pieces):
            print(f"{name}:{line}: {finding}")
            num_headless += bool(CODE.match(name)) and finding.startswith("headless")
            num_others += bool(CODE.match(name)) and not finding.startswith("headless")
        if CODE.match(name):
            num_docstrings += sum(is_docstring and text != "" for _, text, is_docstring in pieces)
    print(f"code: {num_docstrings} docstrings, {num_headless} headless; {num_others} other findings")
    return int(num_others > 0 or num_headless > MOST_HEADLESS * num_docstrings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
