"""Answers are drawn as they grow: what pages put together is what the whole text gives."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from neo_desktop.app.chats.blocks import GrowingBlocks
from neo_desktop.app.chats.news import _merged_deltas
from neo_desktop.ui.markdown import render_blocks

PIECES = st.sampled_from(
    [
        *("word ", "word\n", "\n", "\n\n", "\r\n", "# ", "- ", "1. ", "  ", "    ", "> ", "```"),
        *("```python\n", "~~~\n", "- [ ] ", "é💡"),
        *("| a | b |\n", "|---|---|\n", "$x^2$", "**", "`", "---\n", "===\n", "<b>", "[x]: /y\n"),
        "[x]",
    ]
)


@example(["word\n\\[word\n\\]", "word "])
@settings(deadline=None, max_examples=300)
@given(st.lists(st.lists(PIECES, max_size=6).map("".join), max_size=12))
def test_drawing_from_the_last_block_on_gives_what_the_whole_text_gives(pieces: list[str]) -> None:
    growing, shown, text = GrowingBlocks(), list[str](), ""
    for piece in pieces:
        text += piece
        first, new = growing.update(text)
        assert first <= len(shown)
        shown[first:] = new
    assert shown == render_blocks(text)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(PIECES, max_size=6).map("".join), max_size=12), st.data())
def test_a_slow_page_gets_several_steps_as_one(pieces: list[str], data: st.DataObject) -> None:
    growing, shown, text = GrowingBlocks(), list[str](), ""
    unread = None
    for piece in [*pieces, ""]:
        text += piece
        first, new = growing.update(text)
        delta = {"blocks_from": first, "blocks": new, "thought_blocks_from": 0, "thought_blocks": []}
        unread = delta if unread is None else _merged_deltas(unread, delta)
        if data.draw(st.booleans()) or piece is pieces[-1:]:
            shown[unread["blocks_from"] :] = unread["blocks"]
            unread = None
    if unread is not None:
        shown[unread["blocks_from"] :] = unread["blocks"]
    assert shown == render_blocks(text)
