"""Host memory for GPU copies is pinned, in huge pages, on an imitated runtime."""

import mmap
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch

from neo_desktop.engine.cuda import pinned
from neo_desktop.engine.cuda.pinned import check_weight_pages, kv_bytes, weight_bytes
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.huge_pages import HUGE_PAGE_POLICY, SMAPS, huge_page_bytes
from neo_desktop.engine.loading import gpu_form, made
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.linear.offloaded import MoveBudget, OffloadedFormat

OUT_OF_MEMORY, NOT_REGISTERED = 2, 713


class Runtime:
    """CUDA's table of registered ranges, by address; rejects calls that break the runtime's contract."""

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}
        self.registers = 10**9  # number of calls that still succeed

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        assert address % mmap.PAGESIZE == 0
        assert num_bytes > 0
        assert not any(
            begin < address + num_bytes and address < begin + size for begin, size in self.ranges.items()
        )
        self.registers -= 1
        if self.registers < 0:
            return OUT_OF_MEMORY
        self.ranges[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        if address not in self.ranges:
            return NOT_REGISTERED
        del self.ranges[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """Fake CUDA's runtime, so memory is pinned as on a GPU."""
    made = Runtime()
    all_pages = WeakSet[pinned._Pages]()

    class Pages(pinned._Pages):
        def __init__(self, *_: int) -> None:
            all_pages.add(self)

    monkeypatch.setattr(pinned, "_Pages", Pages)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(pinned, "_forget_refusal", lambda: None)
    yield made
    for pages in all_pages:  # later garbage collection must not call the real runtime
        pages.pinned_at = None


@pytest.mark.skipif(not SMAPS.exists(), reason="the system does not tell of its pages: no /proc/self/smaps")
@pytest.mark.parametrize("kind", ["weights", "KV"])
def test_what_a_gpu_reads_has_huge_pages_and_is_not_copied_by_a_fork(
    runtime: Runtime, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    nbytes = 64 << 20
    memory = kv_bytes(nbytes) if kind == "KV" else weight_bytes(nbytes)
    memory.fill_(1)
    address, flags = memory.data_ptr(), []
    for line in SMAPS.read_text().splitlines():
        name, *words = line.split()
        if "-" in name:
            begin, end = (int(each, 16) for each in name.split("-"))
        elif name == "VmFlags:" and begin <= address < end:
            flags = words
    assert {"hg", "dc"} <= set(flags)  # huge pages, and not copied by a fork
    assert "sh" not in flags
    if "[never]" in HUGE_PAGE_POLICY.read_text():
        pytest.skip(f"the system is set to give no huge pages: {HUGE_PAGE_POLICY}")
    huge = huge_page_bytes([(address, address + nbytes)])
    assert huge is not None
    if huge < nbytes // 2:
        check_weight_pages()
        assert kind == "KV" or "GB of weights in host memory are in huge pages" in caplog.text
        pytest.skip(f"the system had huge pages for {huge >> 20} of 64 MiB")
    check_weight_pages()
    assert fallbacks.level("huge_pages") == "huge"


def test_weights_without_huge_pages_are_told_of(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = weight_bytes(64 << 20)
    begin, smaps = memory.data_ptr(), tmp_path / "smaps"
    monkeypatch.setattr("neo_desktop.engine.huge_pages.SMAPS", smaps)
    check_weight_pages()  # a system without this information
    entry = "{:x}-{:x} rw-p 0 0:0 0\nRss: 65536 kB\nAnonHugePages: {} kB\nVmFlags: rd wr\n"
    elsewhere = entry.format(1 << 20, 2 << 20, 65536)
    for kib, level in ((40960, "huge"), (20480, "small")):
        smaps.write_text(elsewhere + entry.format(begin, begin + memory.nbytes, kib))
        check_weight_pages()
        assert fallbacks.level("huge_pages") == level
    assert "only 0.0 of 0.1 GB of weights in host memory are in huge pages" in caplog.text


def test_kv_is_pinned_while_it_is_there(runtime: Runtime) -> None:
    memory = kv_bytes(5000)
    assert runtime.ranges == {memory.data_ptr(): 5000}
    del memory
    assert not runtime.ranges


def test_kv_that_cannot_be_pinned_is_pageable(runtime: Runtime) -> None:
    runtime.registers = 0
    assert len(kv_bytes(5000)) == 5000
    assert not runtime.ranges
    assert fallbacks.limits()["host_memory"] == "pageable"


def test_experts_and_tables_stay_if_their_memory_cannot_be_pinned(runtime: Runtime) -> None:
    """Memory that was taken before the refusal is released."""
    host_form = replace(DENSE, room=partial(weight_bytes, must_pin=True))
    moving = OffloadedFormat(gpu_form(DENSE), host_form, {}, moves=MoveBudget(1, 1))
    tried: list[OffloadedFormat] = []

    def make(form: OffloadedFormat) -> list[torch.Tensor]:
        assert not runtime.ranges
        tried.append(form)
        found = [form.host_form.room(nbytes) for nbytes in (5000, 6000)]
        return found if form.tables is None else [*found, form.tables(7000)]

    decoder: Any = make
    runtime.registers = 1
    found: Any = made(moving, decoder)
    assert len(found) == 2
    assert tried[0] == moving
    assert [(form.moves is None, form.tables is None) for form in tried[1:]] == [(True, False), (True, True)]
