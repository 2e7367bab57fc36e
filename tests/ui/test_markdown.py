"""What models write becomes what they mean, and nothing that could harm."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neo_desktop.ui.markdown import MAX_CHARS, locate_blocks, render_blocks


def render(text: str) -> str:
    return "".join(render_blocks(text))


@pytest.mark.parametrize(
    "text",
    [r"$E=mc^2$", r"so $x_1 + x_2$.", r"\(a^2\)", r"$$x$$", r"\[x\]", "$$\n\\frac{1}{2}\n$$", "\\[\nx\n\\]"],
)
def test_formulas_are_drawn(text: str) -> None:
    shown = render(text)
    assert "<math" in shown
    assert "$" not in shown
    assert "\\" not in shown


@pytest.mark.parametrize(
    "text",
    [
        "$5 and $6",
        "from $5 to $6.50, or US$7",
        "a $ b $ c",
        "`$x$`",
        "costs $20\nand then $30",
        r"\$x\$",
        "$HOME/$USER",
    ],
)
def test_prices_and_code_are_no_formulas(text: str) -> None:
    assert "<math" not in render(text)


def test_a_formula_between_prose_keeps_its_neighbours() -> None:
    before, formula, after = render_blocks("Energy:\n$$\nE = m c^2\n$$\nas we know")
    assert "Energy" in before
    assert 'display="block"' in formula
    assert "as we know" in after


@pytest.mark.parametrize(
    "latex", ["\\frac{", "}{", "\\left(", "\\begin{matrix}", "^^^", "{" * 500 + "}" * 500]
)
def test_a_formula_that_cannot_be_drawn_is_shown_as_code(latex: str) -> None:
    shown = render(f"$$\n{latex}\n$$")
    assert "<code>" in shown or "<math" in shown
    assert "\\frac" not in latex or "\\frac" in shown


def test_tasks_are_ticked_or_not() -> None:
    done, todo = re.findall("<input[^>]*>", render("- [x] done\n- [ ] to do"))
    assert "checked" in done
    assert "checked" not in todo


def test_code_tells_its_language_and_is_coloured() -> None:
    shown = render("```python\ndef f(): pass\n```")
    assert 'data-language="python"' in shown
    assert '<span class="k">def</span>' in shown
    assert render("```nosuchlanguage\n<b>\n```").count("&lt;b&gt;") == 1


def test_tables_strikethrough_and_alignment() -> None:
    shown = render("| a | b |\n|---|--:|\n| ~~1~~ | 2 |")
    assert '<td align="right">2</td>' in shown
    assert "<s>1</s>" in shown
    assert "style=" not in shown


def test_links_open_elsewhere_and_pictures_are_not_fetched() -> None:
    shown = render("[a](https://example.org/) ![b](https://example.org/b.png)")
    assert shown.count('target="_blank" rel="noopener noreferrer"') == 2
    assert "<img" not in shown


ATTACKS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[a](javascript:alert(1))",
    "[a](data:text/html,<script>alert(1)</script>)",
    "<a href='javascript:alert(1)'>a</a>",
    "![a](x' onerror='alert(1))",
    '```"><script>alert(1)</script>\nx\n```',
    r"$\href{javascript:alert(1)}{x}$",
    r"$\text{<img src=x onerror=alert(1)>}$",
    r"$\style{background:url(https://example.org)}{x}$",
    r"$$\class{x" + '"' + r" onclick=alert(1)}{y}$$",
    "[a](vbscript:x)",
    "<javascript:alert(1)>",
    '[a](https://x "\\" onclick=alert(1)")',
    "<svg/onload=alert(1)>",
    "<iframe src=https://example.org>",
    "<math><mtext><style><img src=x onerror=alert(1)>",
]


@pytest.mark.parametrize("text", ATTACKS)
def test_no_text_becomes_markup_that_acts(text: str) -> None:
    for around in ("{}", "- {}", "> {}", "|a|\n|-|\n|{}|", "# {}"):
        for tag in re.findall(r"<[^>]*>", render(around.format(text))):
            assert not re.match(
                r"<\s*(script|img|svg|iframe|style|object|form|link|meta|base)\b", tag, re.IGNORECASE
            )
            assert not re.search(r"\s(on\w+|style|src|srcset|action|id)\s*=", tag, re.IGNORECASE)
            assert not re.search(r"(javascript|data|vbscript):", tag, re.IGNORECASE)


HOSTILE = {
    "quotes": ">" * 10_000 + " x",
    "brackets": "[" * 50_000,
    "links": "[a](b" * 20_000,
    "stars": "*a " * 30_000,
    "underscores": "_a__" * 20_000,
    "backticks": "".join("`" * number + " " for number in range(400)),
    "formulas": "$a " * 30_000,
    "parentheses": r"\(" * 30_000,
    "lists": "".join("  " * depth + "- x\n" for depth in range(300)),
    "wide table": "|a" * 3_000 + "\n" + "|-" * 3_000 + "\n" + ("|x" * 3_000 + "\n") * 20,
    "long table": "a|b\n-|-\n" + "x|y\n" * 20_000,
    "fractions": "$" + "\\frac{" * 300 + "$",
    "entities": "&" * 90_000,
    "backslashes": "\\" * 90_000,
    "code": "```python\n" + "(" * 40_000,
    "halves of characters": "a\ud800\0b",
    "returns": "a\r\nb\r" * 1_000,
    "huge": "x" * (MAX_CHARS + 1),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.timeout(60)  # what is not bounded takes many minutes
def test_hostile_text_is_shown_in_bounded_time(text: str) -> None:
    assert render_blocks(text)


pieces = st.sampled_from(
    [
        "word",
        " ",
        "\n",
        "\n\n",
        "- ",
        "1. ",
        "```\n",
        "> ",
        "# ",
        "|",
        "|-|-|\n",
        "$$",
        "$x$",
        "**",
        "`",
        "    ",
        "\\[",
        "~~",
    ]
)


@settings(deadline=None)
@given(st.lists(pieces, max_size=30).map("".join))
def test_any_text_renders_and_its_blocks_lie_in_order(text: str) -> None:
    located = locate_blocks(text)
    starts = [start for start, _ in located]
    assert starts == sorted(set(starts))
    assert all(start < len(text) for start in starts)


BLOCKS = [
    "A paragraph with **bold** text\nover two lines.",
    "# A heading",
    "- one\n- two\n  - three\n\n- four",
    "1. one\n2. two",
    "```python\nx = 1\n\ny = 2\n```",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "> a quote\n> goes on",
    "$$\nx^2\n$$",
    "---",
    "- [x] done\n- [ ] not",
]


@settings(deadline=None, max_examples=40)
@given(st.permutations(BLOCKS))
def test_a_growing_text_leaves_what_it_said_and_can_be_rendered_from_its_last_block(order: list[str]) -> None:
    text = "\n\n".join(order)
    final = render_blocks(text)
    fixed, start = [], 0
    for end in range(1, len(text) + 1, 3):
        located = locate_blocks(text[start:end])
        fixed += [block for _, block in located[:-1]]
        start += located[-1][0] if located else 0
        assert fixed == final[: len(fixed)]
    assert fixed + render_blocks(text[start:]) == final
