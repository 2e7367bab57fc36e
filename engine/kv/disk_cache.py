"""The rung below host memory: blocks that leave the caches go to disk, and return before their prompt runs.

    engine's thread    brings: admit blocks     look: publish and let go
    disk's thread                  read files, fill blocks

    engine's thread    keep      look: hold blocks           look: let go
    disk's thread                          write files

A read has blocks of its own in `KVCache`, and announces their content like a request that computes it. So the
scheduler lets the request wait for its prefix, and then finds the prefix in the cache. A write holds its
blocks, so that no request overwrites them.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from queue import PriorityQueue
from threading import Event, Thread

import torch

from neo_desktop.engine.kv.below import Below, BelowCounters
from neo_desktop.engine.kv.block_bytes import BlockBytes
from neo_desktop.engine.kv.block_pool import BlockHash
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv.disk import BlockStore, Key
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.kv_tier import KVTier

logger = logging.getLogger(__name__)

PIECE = 16  # blocks per job of the thread
MOST_HELD = 256  # blocks that wait to be written and cannot be evicted
FREE_SHARE = 4  # at most this fraction of the free blocks is held
WAIT_S = 0.05  # longest wait of the engine's thread, which has other commands to carry out
CLOSE_S = 10.0  # longest time to write the rest
FIRST_RATE = 5e8  # bytes per second, until the disk has been measured
MOST_UNDER_WAY = 2  # iterations at one time
READ, TOUCH, WRITE, STOP = range(4)  # priorities

Job = Callable[[], object]


@dataclass(eq=False)
class _Read:
    """Blocks that come from disk."""

    name: str  # of the blocks' table in the cache
    tier: KVTier
    hashes: Sequence[BlockHash]  # the whole prefix
    blocks: Sequence[int]  # the same
    begin: int  # blocks that were in the cache
    end: int  # leading blocks that are there
    num_looks: int = 0
    has_started: bool = False


class DiskCache(Below):
    """Connects a `BlockStore` to the caches of this computer.

    Args:
        groups: `tier -> group of its keys`; other tiers do not use the disk.
        compute_ms: Returns the predicted time to compute the tokens `begin .. end - 1` of a prompt.
        on_device: Returns a context for the thread's work on the device, which has ended after it.
    """

    def __init__(
        self,
        store: BlockStore,
        kv_cache: KVCache,
        storage: KVStorage,
        groups: Mapping[KVTier, bytes],
        compute_ms: Callable[[int, int], float],
        on_device: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._store, self._kv, self._groups = store, kv_cache, groups
        self._bytes = {tier: BlockBytes(storage[tier]) for tier in groups}
        self._memory = {tier: each.empty(PIECE) for tier, each in self._bytes.items()}
        self._compute_ms, self._on_device = compute_ms, on_device
        self._left: dict[tuple[KVTier, BlockHash], int] = {}  # blocks to write -> time of their use
        self._reading: _Read | None = None
        self._num_jobs = self._num_writes = self._num_lost = self._num_hit_tokens = 0
        self._numbers = count()
        self._is_closed = False
        self._bytes_per_s = FIRST_RATE
        self._jobs: PriorityQueue[tuple[int, int, Job, Job]] = PriorityQueue()
        self._ends: deque[Job] = deque()  # for the engine's thread
        self._has_ended = Event()
        self._thread = Thread(target=self._run, name="disk cache", daemon=True)
        self._thread.start()
        self._submit(READ, self._measure)

    @property
    def counters(self) -> BelowCounters:
        store = self._store
        dropped_bytes = store.dropped_bytes + self._num_lost
        return BelowCounters(store.read_bytes, store.written_bytes, dropped_bytes, self._num_hit_tokens)

    def keep(self, tier: KVTier, hashes: Sequence[BlockHash]) -> None:
        if tier not in self._groups or not self._store.is_writable:
            return
        now = time.time_ns()
        # The end of a prefix is useless without its beginning, and so counts as used earlier.
        used = {block_hash: now - 1000 * depth for depth, block_hash in enumerate(hashes)}
        known = {key: used[key.name] for each in used if self._store.has(key := self._key(tier, each))}
        if known:
            self._submit(TOUCH, partial(self._touch, known))
        for block_hash, used_ns in used.items():
            if self._key(tier, block_hash) not in known:
                self._left[tier, block_hash] = used_ns

    def brings(self, num_tokens: int, hashes: Sequence[BlockHash], tier: KVTier) -> bool:
        if (read := self._reading) is not None:
            return read.tier == tier and read.hashes[-1] in hashes
        if tier not in self._groups or self._is_closed:
            return False
        size = self._kv.block_size
        usable = hashes[: (num_tokens - 1) // size]
        begin = end = self._kv.num_leading(usable, tier)
        while end < len(usable) and self._store.has(self._key(tier, usable[end])):
            end += 1
        read_ms = 1e3 * (end - begin) * self._bytes[tier].block_bytes / self._bytes_per_s
        if begin == end or read_ms >= self._compute_ms(begin * size, end * size):
            return False
        name, rest = self._name(), self._kv.blocks_for(num_tokens) - end
        num_shared = self._kv.admit(name, end * size, usable[:end], tier, reserve_blocks=rest)
        if num_shared is None:
            return False
        blocks = self._kv.block_table(name).tolist()
        begin = num_shared // size
        self._reading = _Read(name, tier, usable[:end], blocks, begin, begin)
        return True

    def look(self, num_under_way: int) -> None:
        self._finish()
        if (read := self._reading) is not None and not read.has_started:
            read.num_looks += 1
            # Iterations that run since before the admission may still write to the blocks' earlier content.
            if not num_under_way or read.num_looks > MOST_UNDER_WAY:
                self._start(read)
        if self._left and not self._num_writes:
            self._start_writes()

    def wait(self) -> bool:
        if (read := self._reading) is not None and not read.has_started:
            self._start(read)
        if not self._num_jobs:
            return False
        self._has_ended.wait(WAIT_S)
        self._has_ended.clear()
        self._finish()
        return True

    def close(self) -> None:
        self._is_closed = True
        end_s = time.monotonic() + CLOSE_S
        while (self._left or self._num_jobs) and time.monotonic() < end_s:
            self.look(0)
            if not self.wait():
                break
        self._left.clear()
        self._submit(STOP, _nothing)
        self._thread.join(CLOSE_S)

    def _key(self, tier: KVTier, block_hash: BlockHash) -> Key:
        return Key(self._groups[tier], block_hash)

    def _name(self) -> str:
        return f"disk {next(self._numbers)}"

    def _submit(self, priority: int, job: Job, end: Job | None = None) -> None:
        self._num_jobs += 1
        self._jobs.put((priority, next(self._numbers), job, end or _nothing))

    def _finish(self) -> None:
        """Do the engine's part of the jobs that have ended."""
        while self._ends:
            self._num_jobs -= 1
            self._ends.popleft()()

    def _start(self, read: _Read) -> None:
        read.has_started = True
        for begin in range(read.begin, len(read.blocks), PIECE):
            end = partial(self._end_read, read) if begin + PIECE >= len(read.blocks) else None
            self._submit(READ, partial(self._read, read, begin), end)

    def _end_read(self, read: _Read) -> None:
        self._kv.commit(read.name, read.hashes, read.end * self._kv.block_size)
        self._kv.let_go(read.name)
        self._num_hit_tokens += (read.end - read.begin) * self._kv.block_size
        self._reading = None

    def _start_writes(self) -> None:
        """Write the blocks that left first, of one tier."""
        if not self._store.is_writable:
            self._left.clear()
            return
        tier = next(iter(self._left))[0]
        most = min(MOST_HELD, self._kv.num_free_blocks(tier) // FREE_SHARE)
        left = list(islice((block_hash for there, block_hash in self._left if there == tier), most))
        for begin in range(0, len(left), PIECE):
            used = {each: self._left.pop((tier, each)) for each in left[begin : begin + PIECE]}
            name = self._name()
            blocks = self._kv.hold(name, list(used), tier)
            self._num_lost += (len(used) - len(blocks)) * self._bytes[tier].block_bytes
            self._num_writes += 1
            keys = {self._key(tier, each): used[each] for each in blocks}
            job = partial(self._write, tier, keys, list(blocks.values()))
            self._submit(WRITE, job, partial(self._end_write, name))

    def _end_write(self, name: str) -> None:
        self._kv.let_go(name)
        self._num_writes -= 1

    # The thread of the disk.

    def _run(self) -> None:
        priority = READ
        while priority != STOP:
            priority, _, job, end = self._jobs.get()
            try:
                with self._on_device(), torch.inference_mode():
                    job()
            except Exception:
                logger.exception("KV on disk is not used any more")
                self._store.give_up()
            self._ends.append(end)
            self._has_ended.set()

    def _measure(self) -> None:
        self._bytes_per_s = self._store.bytes_per_s() or self._bytes_per_s

    def _read(self, read: _Read, begin: int) -> None:
        if read.end < begin:  # an earlier block is missing
            return
        started_s, now = time.perf_counter(), time.time_ns()
        blocks, memory = read.blocks[begin : begin + PIECE], self._memory[read.tier]
        num_read = 0
        for content, block_hash in zip(memory, read.hashes[begin : begin + PIECE], strict=False):
            key = self._key(read.tier, block_hash)
            if not self._store.read(key, content.data):
                break
            self._store.touch(key, now - 1000 * (begin + num_read))
            num_read += 1
        if num_read:
            self._bytes[read.tier].put(blocks[:num_read], memory[:num_read])
            read.end += num_read
            rate = num_read * self._bytes[read.tier].block_bytes / (time.perf_counter() - started_s)
            self._bytes_per_s += (rate - self._bytes_per_s) / 4

    def _write(self, tier: KVTier, keys: Mapping[Key, int], blocks: Sequence[int]) -> None:
        if not blocks or not self._store.is_writable:
            return
        memory = self._memory[tier]
        self._bytes[tier].take(blocks, memory[: len(blocks)])
        for content, (key, used_ns) in zip(memory, keys.items(), strict=False):
            self._store.write(key, content.data, used_ns)

    def _touch(self, used: Mapping[Key, int]) -> None:
        for key, used_ns in used.items():
            self._store.touch(key, used_ns)


def _nothing() -> None:
    pass
