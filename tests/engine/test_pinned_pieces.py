"""The swap-cache of a GPU gives pinned memory back, piece by piece, on an imitated runtime."""

import logging
import mmap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from weakref import WeakSet

import pytest
import torch
from imitated_streams import ImitatedBackend
from pipeline_case import BLOCK_SIZE, check_result, make_storage, sampling_input, tiny_model
from reserve_case import PARAMS, PROMPTS, RESERVE, Machine, tiny_engine
from torch import Tensor

from neo_desktop import native
from neo_desktop.engine.batch import IterationPlan, ScheduledSequence, SubBatch
from neo_desktop.engine.cuda import pinned
from neo_desktop.engine.cuda.pinned import PinnedPieces, check_weight_pages, weight_bytes
from neo_desktop.engine.execute.layout import Capacity
from neo_desktop.engine.execute.plan_executor import PlanExecutor
from neo_desktop.engine.host_reserve import HostReserve
from neo_desktop.engine.huge_pages import HUGE_PAGE_POLICY, SMAPS, huge_page_bytes
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.kv import swapped
from neo_desktop.engine.kv.layer import KVLayer
from neo_desktop.engine.kv.swapped import SwappedPool
from neo_desktop.engine.ladder import ladder
from neo_desktop.engine.placement import Place
from neo_desktop.models.stages import Stages

OUT_OF_MEMORY, NOT_REGISTERED = 2, 713


class Runtime:
    """What CUDA's runtime knows of registered ranges, by address; it refuses what it does not promise."""

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}
        self.ever: dict[int, int] = {}  # ranges that were registered once
        self.registers = self.unregisters = 10**9  # so many calls more succeed

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        assert address % mmap.PAGESIZE == 0
        assert num_bytes > 0
        assert not any(
            begin < address + num_bytes and address < begin + size for begin, size in self.ranges.items()
        )
        self.registers -= 1
        if self.registers < 0:
            return OUT_OF_MEMORY
        self.ranges[address] = self.ever[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        if address not in self.ranges:
            return NOT_REGISTERED
        self.unregisters -= 1
        if self.unregisters < 0:
            return OUT_OF_MEMORY
        del self.ranges[address]
        return 0

    def check(self, memory: Tensor) -> None:
        """Fail if a copy would reach from one registered range into another, or into what is none."""
        begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        if not any(begin < at + size and at < end for at, size in self.ever.items()):
            return
        assert memory.is_contiguous()
        assert any(at <= begin and end <= at + size for at, size in self.ranges.items())


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """Let memory of the CPU be pinned as a GPU's is; every copy from and to it is checked."""
    made = Runtime()
    all_pages = WeakSet[pinned._Pages]()

    class Pages(pinned._Pages):
        def __init__(self, *_: int) -> None:
            all_pages.add(self)

    monkeypatch.setattr(pinned, "_Pages", Pages)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(pinned, "_forget_refusal", lambda: None)
    monkeypatch.setattr(swapped, "_pins", lambda device: True)
    copy, fill, store_rows = Tensor.copy_, KVLayer.fill, native.store_rows

    def checked_copy(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        made.check(self)
        made.check(source)
        return copy(self, source, non_blocking)

    def checked_fill(self: KVLayer, k: Tensor, v: Tensor, first: int = 0) -> None:
        made.check(k)
        made.check(v)
        fill(self, k, v, first)

    def checked_store(rows: Tensor, slots: Tensor, into: Tensor) -> None:
        for slot in slots.tolist():
            for layer in into:
                made.check(layer[slot])
        store_rows(rows, slots, into)

    monkeypatch.setattr(Tensor, "copy_", checked_copy)
    monkeypatch.setattr(KVLayer, "fill", checked_fill)
    monkeypatch.setattr(swapped, "native", SimpleNamespace(store_rows=checked_store))
    yield made
    for pages in all_pages:  # what goes later must not ask the real runtime
        pages.pinned_at = frozenset()


def make_pool(num_blocks: int = 64) -> SwappedPool:
    config = replace(tiny_model((None,) * 4).config, num_kv_heads=4, head_dim=64)
    return SwappedPool(config, num_blocks, BLOCK_SIZE, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("num_blocks", [1, 40, 64, 101])
@pytest.mark.parametrize("block_bytes", [48, 4096, 10240])
def test_pieces_are_whole_pages_and_go_and_come(runtime: Runtime, num_blocks: int, block_bytes: int) -> None:
    pieces = PinnedPieces(6, num_blocks, block_bytes, 4)
    assert pieces.num_pinned == pieces.num_blocks >= num_blocks
    assert sum(runtime.ranges.values()) == pieces.memory.nbytes
    for kept in (num_blocks - num_blocks // 2, num_blocks - num_blocks * 2 // 3, 1):
        begin = pieces.unpin(kept)
        assert kept <= begin == pieces.num_pinned < max(kept + pieces.piece_blocks, pieces.num_blocks + 1)
        assert sum(runtime.ranges.values()) == 6 * begin * block_bytes
    assert pieces.pin(pieces.num_blocks) == pieces.num_blocks
    assert sum(runtime.ranges.values()) == pieces.memory.nbytes
    del pieces
    assert not runtime.ranges


@pytest.mark.skipif(not SMAPS.exists(), reason="the system does not tell of its pages: no /proc/self/smaps")
@pytest.mark.parametrize("kind", ["weights", "KV"])
def test_what_a_gpu_reads_has_huge_pages_and_is_not_copied_by_a_fork(
    runtime: Runtime, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    nbytes = 64 << 20
    pieces = PinnedPieces(1, nbytes // 4096, 4096, 1) if kind == "KV" else None
    memory = weight_bytes(nbytes) if pieces is None else pieces.memory
    memory.fill_(1)
    address, flags = memory.data_ptr(), []
    for line in SMAPS.read_text().splitlines():
        name, *words = line.split()
        if "-" in name:
            begin, end = (int(each, 16) for each in name.split("-"))
        elif name == "VmFlags:" and begin <= address < end:
            flags = words
    assert {"hg", "dc"} <= set(flags)  # huge pages, not copied by a fork
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
    assert ladder.rung("huge_pages") == "huge"


def test_weights_without_huge_pages_are_told_of(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = weight_bytes(64 << 20)
    begin, smaps = memory.data_ptr(), tmp_path / "smaps"
    monkeypatch.setattr("neo_desktop.engine.huge_pages.SMAPS", smaps)
    check_weight_pages()  # of a system that does not tell
    entry = "{:x}-{:x} rw-p 0 0:0 0\nRss: 65536 kB\nAnonHugePages: {} kB\nVmFlags: rd wr\n"
    elsewhere = entry.format(1 << 20, 2 << 20, 65536)
    for kib, rung in ((40960, "huge"), (20480, "small")):
        smaps.write_text(elsewhere + entry.format(begin, begin + memory.nbytes, kib))
        check_weight_pages()
        assert ladder.rung("huge_pages") == rung
    assert "only 0.0 of 0.1 GB of weights in host memory are in huge pages" in caplog.text


def test_first_all_is_pinned_or_nothing(runtime: Runtime) -> None:
    runtime.registers = 10
    pieces = PinnedPieces(6, 64, 4096, 4)
    assert not runtime.ranges
    assert ladder.limits()["host_memory"] == "pageable"
    assert pieces.unpin(9) == 2 * 8
    assert pieces.num_pinned == pieces.pin(64) == 64


def test_what_is_refused_again_stays_away_and_is_told_once(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    pieces = PinnedPieces(6, 64, 4096, 4)
    pieces.unpin(16)
    for _ in range(2):
        runtime.registers = 6 + 3  # a piece of each part, and of half of them another
        assert pieces.pin(64) in (24, 32)
        assert sum(runtime.ranges.values()) == 6 * pieces.num_pinned * 4096
    assert [record.message for record in caplog.records] == [
        "memory cannot be pinned again, so the cache stays smaller: CUDA error 2"
    ]


def test_what_is_not_unpinned_stays_in_use(runtime: Runtime) -> None:
    pieces = PinnedPieces(6, 64, 4096, 4)
    runtime.unregisters = 8
    with pytest.raises(OSError, match="does not undo"):
        pieces.unpin(16)
    assert pieces.pin(64) == 64
    assert len(runtime.ranges) == 6 * 8


def test_a_pool_gives_back_what_lies_behind_a_border(runtime: Runtime) -> None:
    pool = make_pool()
    for home in pool.homes:
        home.fill_(3)
    pinned_bytes = sum(runtime.ranges.values())
    assert pool.held_blocks(0) == 64
    pool.give_back(16)
    assert sum(runtime.ranges.values()) == pinned_bytes // 4
    assert pool.present_blocks == pool.held_blocks(64) == 16
    for home in pool.homes:
        assert (home[:, : 16 * BLOCK_SIZE] == 3).all()
        assert (home[:, 16 * BLOCK_SIZE :] == 0).all()
    pool.bring(1, [swapped.BlockRun(1, 15)])  # across a border


@pytest.mark.parametrize("policy", ["pie", "auto"])
def test_tokens_stay_the_same_while_pinned_memory_goes_and_comes(
    runtime: Runtime, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    with tiny_engine(policy) as engine:
        expected = [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]
    available = [RESERVE - 10**5 if i % 4 < 2 else 10**6 for i in range(10_000)]
    with tiny_engine(policy, machine=Machine(available)) as engine, caplog.at_level(logging.INFO):
        whole = sum(runtime.ranges.values())
        sizes, unregister = set[int](), runtime.cudaHostUnregister

        def noted(address: int) -> int:
            error = unregister(address)
            sizes.add(sum(runtime.ranges.values()))
            return error

        runtime.cudaHostUnregister = noted  # type: ignore[method-assign]
        assert [output.token_ids for output in engine.generate(PROMPTS, PARAMS)] == expected
        assert sizes, "the test did not reach what it is about"
        assert min(sizes) < whole
        for what in (f"the {Place.SWAPPED.title} gave back", f"the {Place.SWAPPED.title} has"):
            assert any(what in record.message for record in caplog.records)


@pytest.mark.parametrize("call", ["registers", "unregisters"])
def test_whatever_is_refused_requests_end_with_their_tokens(
    runtime: Runtime, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    with tiny_engine("pie") as engine:
        expected = [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]
    available = [RESERVE - 10**5] * 2 + [10**6] * 10_000
    with tiny_engine("pie", machine=Machine(available)) as engine:
        setattr(runtime, call, 0)
        assert [output.token_ids for output in engine.generate(PROMPTS, PARAMS)] == expected
        size = engine._kv_cache.size(Place.SWAPPED)
        assert (size.limit < size.most) == (call == "registers")
        assert isinstance(engine._iterations._reserve, HostReserve)
    said = [record.message for record in caplog.records if "cannot be" in record.message]
    assert len(said) == 1


def test_graphs_copy_nothing_that_is_gone(runtime: Runtime) -> None:
    """Sizes of graphs are rounded up: without a bound their copies would reach behind what is pinned."""
    model = tiny_model((None,) * 4)
    storage = make_storage(model, {Place.SWAPPED: 64})
    backend = ImitatedBackend(0)
    capacity = Capacity.of(64, 4, 256, BLOCK_SIZE)
    executor = PlanExecutor(
        Stages(model, dispatch), storage, capacity, backend, num_programs=8, uses_gpu=True
    )
    pool = storage[Place.SWAPPED]
    assert isinstance(pool, SwappedPool)
    together = pool.blocks_given_back
    blocks = IntArray(list(range(together - 4, together + 1))).view()  # across a border
    tokens = [(7 * i) % 257 for i in range(5 * BLOCK_SIZE)]

    def compute(start: int, end: int) -> None:
        part = tuple(tokens[start:end])
        sequence = ScheduledSequence("a", part, start, Place.SWAPPED, blocks, sampling_input(end))
        plan = IterationPlan((SubBatch((sequence,)),))
        check_result(model, plan, {"a": tokens[:end]}, executor.execute(plan))

    first = 4 * BLOCK_SIZE + 1
    compute(0, first)
    for step in range(3):
        compute(first + step, first + step + 1)
    assert backend.was_graph
    pool.give_back(together + 1)
    assert pool.present_blocks == 2 * together
    for step in range(3, 6):
        compute(first + step, first + step + 1)
        assert backend.was_graph == (step > 3)
    assert pool.take_again(64) == 64
    compute(first + 6, first + 7)
    assert not backend.was_graph
    executor.close()
