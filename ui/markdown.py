"""Markdown as models write it, to HTML that is safe to show.

CommonMark with tables, strikethrough, task lists and formulas. Everything a text can cause is bounded: a text
is untrusted, and rendering happens on the server. Raw HTML is shown as it is written, pictures are shown as
links (a page must not call out because a model says so), and nh3 lets nothing through that is not listed.
"""

import html
import logging
import re
from functools import lru_cache

import nh3
from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from mdit_py_plugins.tasklists import tasklists_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

from neo_desktop.ui.formulas import formula_html, formulas_plugin

logger = logging.getLogger(__name__)

MAX_CHARS = 200_000  # of a text; longer ones are shown as they are written
MAX_INLINE_CHARS = 20_000  # of the prose in one block, likewise: here lies most of the work
MAX_CODE_CHARS = 50_000  # longer code has no colours

_TAGS = """
p br hr h1 h2 h3 h4 h5 h6 blockquote ul ol li a em strong s code pre span div table thead tbody tr th td input
math mrow mi mn mo mtext mspace msup msub msubsup mfrac msqrt mroot mover munder munderover mtable mtr mtd
mfenced mstyle mpadded mphantom menclose mmultiscripts mprescripts
"""
_ATTRIBUTES = {
    tag: set(attributes.split())
    for tag, attributes in {
        "a": "href target",
        "ol": "start",
        "li": "class",
        "input": "type checked disabled",
        "pre": "data-language",
        "span": "class",
        "div": "class",
        "th": "align",
        "td": "align",
        "math": "display",
        "mo": "stretchy fence form separator lspace rspace minsize maxsize accent symmetric",
        "mi": "mathvariant",
        "mfrac": "linethickness",
        "mspace": "width height depth linebreak",
        "mtable": "columnalign rowspacing columnspacing columnlines rowlines",
        "mtd": "columnalign",
        "mstyle": "displaystyle scriptlevel mathvariant",
        "mover": "accent",
        "munder": "accentunder",
        "menclose": "notation",
        "mpadded": "width height depth lspace voffset",
    }.items()
}
_UNUSABLE = re.compile("[\ud800-\udfff\0]")  # halves of characters
_SCHEMES = {"http", "https", "mailto"}


def render_blocks(text: str) -> list[str]:
    """Return the HTML of each block (paragraph, list, code, table, formula, …) of a text, in order.

    A text that grows changes its last block or adds some; blocks before the last one stay as they are.
    Never raises.
    """
    return [block for _, block in locate_blocks(text)]


def locate_blocks(text: str) -> list[tuple[int, str]]:
    """`render_blocks`, each block with the index of its first character.

    So a text that grows can be rendered from its last block on: what comes before has been said for good.
    """
    if len(text) > MAX_CHARS:
        return [(0, as_written(text))]
    # Replaced one for one: places in the text stay what they are.
    text = _UNUSABLE.sub("\ufffd", text).replace("\r\n", " \n").replace("\r", "\n")
    try:
        return _render(text)
    except Exception:
        logger.exception("a text could not be rendered")
        return [(0, as_written(text))]


def as_written(text: str) -> str:
    """A text without any meaning to its signs."""
    return f"<pre><code>{html.escape(text)}</code></pre>"


def _render(text: str) -> list[tuple[int, str]]:
    """The blocks, each with where it starts in the text."""
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    blocks = []
    for group in _top_level(_PARSER.parse(text)):
        first, _ = group[0].map or [0, 0]
        blocks.append((starts[first], _clean(_PARSER.renderer.render(group, _PARSER.options, {}))))
    return blocks


def _show_huge_blocks_as_written(state: StateCore) -> None:
    lines = state.src.split("\n")
    kept: list[Token] = []
    for group in _top_level(state.tokens):
        if sum(len(token.content) for token in group if token.type == "inline") > MAX_INLINE_CHARS:
            first, end = group[0].map or [0, 0]
            kept.append(Token("code_block", "code", 0, content="\n".join(lines[first:end]), map=[first, end]))
        else:
            kept += group
    state.tokens = kept


def _top_level(tokens: list[Token]) -> list[list[Token]]:
    """Tokens by the block of the outermost level that they belong to."""
    groups: list[list[Token]] = []
    is_inside = False
    for token in tokens:
        if is_inside:
            groups[-1].append(token)
        else:
            groups.append([token])
        if token.level == 0 and token.nesting != 0:
            is_inside = token.nesting > 0
    return groups


@lru_cache(maxsize=256)
def _clean(markup: str) -> str:
    return nh3.clean(
        markup,
        tags=set(_TAGS.split()),
        attributes=_ATTRIBUTES,
        url_schemes=_SCHEMES,
        link_rel="noopener noreferrer",
    )


def _make_parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "highlight": None, "linkify": False})
    parser.enable(["table", "strikethrough"])
    # A definition below would change links above it, which are on the page already.
    parser.disable("reference")
    parser.use(tasklists_plugin)
    parser.use(formulas_plugin)
    parser.core.ruler.before("inline", "huge", _show_huge_blocks_as_written)
    rules = parser.renderer.rules  # type: ignore[attr-defined]
    rules["link_open"] = _link_open
    rules["image"] = _image
    rules["fence"] = rules["code_block"] = _code
    rules["table_open"] = lambda *_: '<div class="table-scroll"><table>\n'
    rules["table_close"] = lambda *_: "</table></div>\n"
    rules["th_open"] = rules["td_open"] = _cell
    rules["list_item_open"] = _list_item
    rules["math_inline"] = rules["math_block"] = _formula
    return parser


def _link_open(tokens: list[Token], index: int, *_: object) -> str:
    href = html.escape(str(tokens[index].attrs.get("href", "")))
    return f'<a href="{href}" target="_blank">'


def _image(tokens: list[Token], index: int, *_: object) -> str:
    # The page never fetches what a text names; readers who want to see it follow the link.
    token = tokens[index]
    address = html.escape(str(token.attrs.get("src", "")))
    return f'<a href="{address}" target="_blank">{html.escape(token.content or "picture")}</a>'


def _code(tokens: list[Token], index: int, *_: object) -> str:
    token = tokens[index]
    language = token.info.split()[0] if token.info.strip() else ""
    shown = f' data-language="{html.escape(language[:30])}"' if language else ""
    return f"<pre{shown}><code>{_coloured(token.content, language)}</code></pre>\n"


@lru_cache(maxsize=128)
def _coloured(code: str, language: str) -> str:
    if not language or len(code) > MAX_CODE_CHARS:
        return html.escape(code)
    try:
        lexer = get_lexer_by_name(language.lower(), stripnl=False, ensurenl=False)
    except ClassNotFound:
        return html.escape(code)
    coloured: str = highlight(code, lexer, _FORMATTER)
    return coloured


def _cell(tokens: list[Token], index: int, *_: object) -> str:
    token = tokens[index]
    # Inline styles are not allowed on the page.
    side = str(token.attrs.get("style", "")).removeprefix("text-align:")
    return f'<{token.tag} align="{side}">' if side else f"<{token.tag}>"


def _list_item(tokens: list[Token], index: int, *_: object) -> str:
    is_task = "task-list-item" in str(tokens[index].attrs.get("class", ""))
    return '<li class="task">' if is_task else "<li>"


def _formula(tokens: list[Token], index: int, *_: object) -> str:
    token = tokens[index]
    return formula_html(token.content, is_display=token.type == "math_block" or token.markup in ("$$", "\\["))


_FORMATTER = HtmlFormatter(nowrap=True)
_PARSER = _make_parser()
