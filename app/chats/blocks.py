"""Texts as HTML, block by block: whole ones remembered, growing ones from their last block on."""

from functools import lru_cache

from neo_desktop.ui.markdown import locate_blocks


@lru_cache(maxsize=512)
def blocks(text: str) -> tuple[str, ...]:
    """The HTML of a whole text's blocks."""
    return tuple(block for _, block in locate_blocks(text))


class GrowingBlocks:
    """The blocks of a text that grows.

    Whole lines never change the blocks before the last one. A line that is not whole yet may: after a
    paragraph "#" is a heading, but "#1" goes on with it; "\\]" ends a formula, which is no block of its own
    when words follow. So what is rendered again begins with the last block of whole lines, or the one before.
    (A formula's end can join even more blocks; that shows when the answer is complete and rendered whole.)
    """

    def __init__(self) -> None:
        self._num_final = 0
        self._start = 0  # of the last block, in characters

    def update(self, text: str) -> tuple[int, list[str]]:
        """Return which block to replace from, and the blocks from there on; the text begins as before."""
        tail, first = text[self._start :], self._num_final
        located = locate_blocks(tail)
        last_line = tail.rfind("\n") + 1
        num_begun = sum(start < last_line for start, _ in located)  # in whole lines
        goes_on = num_begun == len(located) and bool(tail[last_line:].strip())
        num_final = num_begun - (2 if goes_on else 1)
        if num_final > 0:
            self._num_final += num_final
            self._start += located[num_final][0]
        return first, [block for _, block in located]
