"""Huge pages of host memory: requested, and verified after the memory was written."""

import mmap
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from neo_desktop import native
from neo_desktop.engine.fallbacks import fallbacks

HUGE_PAGE_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SMAPS = Path("/proc/self/smaps")
HUGE_BYTES = 2 << 20
ENOUGH = 0.5  # share of memory in huge pages; below it, a warning is due


def ask_for_huge_pages(tensor: Tensor) -> None:
    """Request huge pages for unwritten memory, if the fallback level allows them.

    Args:
        tensor: page-aligned, in private memory: shared memory gets no huge pages.
    """
    if fallbacks.level("huge_pages") == "small" or tensor.nbytes < mmap.PAGESIZE:
        return
    if not native.advise_huge_pages(tensor):
        fallbacks.limit("huge_pages", "small", "the system has no huge pages to give")
    elif "[never]" in _read(HUGE_PAGE_POLICY):
        fallbacks.limit(
            "huge_pages", "small", f"the system is set to give none: {HUGE_PAGE_POLICY} says never"
        )


def check_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Fall back to small pages if written memory got too few of the huge pages it asked for."""
    ranges = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors]
    # A range below two huge pages may not contain an aligned one.
    ranges = [(begin, end) for begin, end in ranges if end - begin >= 2 * HUGE_BYTES]
    total, huge = sum(end - begin for begin, end in ranges), huge_page_bytes(ranges)
    if huge is not None and huge < ENOUGH * total and fallbacks.level("huge_pages") == "huge":
        fallbacks.limit(
            "huge_pages",
            "small",
            f"only {huge / 1e9:.1f} of {total / 1e9:.1f} GB of weights in host memory are in huge pages, "
            "which slows the CPU down: close other programs, or restart the computer",
        )


def huge_page_bytes(ranges: Iterable[tuple[int, int]]) -> int | None:
    """Return the bytes in huge pages of mappings that overlap the address ranges; None: unknown."""
    wanted, num_bytes, is_wanted = list(ranges), 0, False
    text = _read(SMAPS)
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if name == "AnonHugePages:" and is_wanted:
            num_bytes += int(rest.split()[0]) * 1024
        elif not name.endswith(":"):  # the start of a mapping: "7f00-7f01 rw-p .."
            begin, end = (int(address, 16) for address in name.split("-"))
            is_wanted = any(first < end and begin < last for first, last in wanted)
    return num_bytes if text else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
