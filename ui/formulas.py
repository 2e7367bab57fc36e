"""Formulas in Markdown: `$…$`, `$$…$$`, `\\(…\\)`, `\\[…\\]` as MathML, which browsers draw themselves."""

import html
import re
from functools import lru_cache

from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline

MAX_FORMULA_CHARS = 2_000
MAX_FORMULA_LINES = 100
MAX_DEPTH = 40  # of braces and environments

# A pair of single dollars: no space inside next to them, no digit after the closing one, no line end between:
# "$5 and $6" are prices, and a price does not pair with one lines below.
_DOLLAR = re.compile(r"\$(?![\s$])((?:\\.|[^\\$\n])+?)(?<!\s)\$(?![\w$])")
_DOUBLE = re.compile(r"\$\$((?:\\.|[^\\$]|\$(?!\$))+?)\$\$")
_PAREN = re.compile(r"\\\(((?:\\(?!\))[\s\S]|[^\\])+?)\\\)")
_BRACKET = re.compile(r"\\\[((?:\\(?!\])[\s\S]|[^\\])+?)\\\]")
_CLOSING = {"$$": "$$", "\\[": "\\]"}


def formulas_plugin(parser: MarkdownIt) -> None:
    """Let a parser find formulas: tokens `math_inline` and `math_block`, markup: what opened it."""
    parser.inline.ruler.before("escape", "formula", _inline)
    parser.block.ruler.before(
        "fence", "formula", _block, {"alt": ["paragraph", "reference", "blockquote", "list"]}
    )


def _inline(state: StateInline, silent: bool) -> bool:
    source, at = state.src, state.pos
    if source[at] == "$":
        patterns = (_DOUBLE, _DOLLAR)
        # "US$5" and "a$b$c" are no formulas.
        if at > 0 and (source[at - 1].isalnum() or source[at - 1] == "$"):
            return False
    elif source[at] == "\\":
        patterns = (_PAREN, _BRACKET)
    else:
        return False
    end = min(state.posMax, at + MAX_FORMULA_CHARS)
    match = next((found for pattern in patterns if (found := pattern.match(source, at, end))), None)
    if match is None:
        return False
    if not silent:
        token = state.push("math_inline", "math", 0)
        token.content = match[1].strip()
        token.markup = source[at : at + 2] if source[at : at + 2] in ("$$", "\\[", "\\(") else "$"
    state.pos = match.end()
    return True


def _block(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """A formula on lines of its own, from `$$` or `\\[` at the start of one to the closing sign at an end."""
    first = state.bMarks[start] + state.tShift[start]
    opening = state.src[first : first + 2]
    if state.is_code_block(start) or opening not in _CLOSING:
        return False
    found = _lines_until(_CLOSING[opening], state, start, end)
    if found is None:
        return False
    if not silent:
        token = state.push("math_block", "math", 0)
        token.content = "\n".join(found).strip()
        token.markup = opening
        token.map = [start, start + len(found)]
        token.block = True
        state.line = start + len(found)
    return True


def _lines_until(closing: str, state: StateBlock, start: int, end: int) -> list[str] | None:
    """A block formula's lines without its signs; None: it is none.

    An empty line ends it: what has not been closed until then is none, and no text below can make it one.
    """
    lines: list[str] = []
    for line in range(start, end):
        text = state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]].rstrip()
        if line == start:
            text = text[2:]
        elif not text or state.sCount[line] < state.blkIndent:
            return None
        if text.endswith(closing):
            return [*lines, text[:-2]]
        if closing in text or len(lines) > MAX_FORMULA_LINES:
            return None
        lines.append(text)
    return None


@lru_cache(maxsize=512)
def formula_html(latex: str, is_display: bool) -> str:
    """MathML of a formula; what is not LaTeX that we can draw is shown as code."""
    depth = deepest = 0
    for sign in re.findall(r"[{}]|\\left|\\right|\\begin|\\end", latex):
        depth += 1 if sign in ("{", "\\left", "\\begin") else -1
        deepest = max(deepest, depth)
    if latex and len(latex) <= MAX_FORMULA_CHARS and deepest <= MAX_DEPTH:
        try:
            return convert(latex, display="block" if is_display else "inline")
        except Exception:  # the library raises what comes: IndexError, RecursionError, its own
            pass
    return f"<code>{html.escape(latex)}</code>"
