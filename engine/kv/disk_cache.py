"""The rung below host memory: blocks that leave the caches go to disk, and return before their prompt runs.

    engine's thread    brings: admit blocks     look: publish and let go
    disk's thread                  read files, fill blocks

    engine's thread    keep      look: hold blocks           look: let go
    disk's thread                          write files

A read has blocks of its own in `KVCache`, and announces their content like a request that computes it. So the
scheduler lets the request wait for its prefix, and then finds the prefix in the cache. A write holds its
blocks, so that no request overwrites them. Checkpoints of recurrent states take the same ways.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import PriorityQueue
from threading import Event, Thread

import numpy as np
import torch

from neo_desktop.engine.kv.block_pool import BlockHash
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv.disk import BlockStore, DiskCounters, Key
from neo_desktop.engine.kv.disk_items import Blocks, Checkpoints
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.kv_tier import KVTier

logger = logging.getLogger(__name__)

WAIT_S = 0.05  # longest wait of the engine's thread.
CLOSE_S = 10.0  # longest time to write the rest.
JOIN_S = 1.0  # longest wait for the thread, whose device may be lost.
FIRST_RATE = 5e8  # bytes per second, until the disk has been measured.
MOST_UNDER_WAY = 2  # iterations at one time.
READ, TOUCH, WRITE, STOP = range(4)  # priorities

Job = Callable[[], object]


@dataclass(eq=False)
class _Read:
    """A prefix that comes from disk, with the state after it."""

    name: str  # of its table in the cache, and of the state's slot
    tier: KVTier
    hashes: Sequence[BlockHash]
    blocks: Sequence[int]
    slot: int | None  # of the state; None: no state is read
    num_usable: int  # leading blocks that a request could use without the read
    begin: int  # the first block to read
    end: int  # the first block that is not there yet
    has_state: bool = False
    num_looks: int = 0
    has_started: bool = False


class DiskCache:
    """Connects a `BlockStore` to the caches of this computer. The engine's thread makes all calls.

    Args:
        groups: `tier -> group of its keys`; None: of recurrent states. Other tiers do not use the disk.
        compute_ms: Returns the predicted time to compute the tokens `begin .. end - 1` of a prompt.
        on_device: Returns a context for the thread's work on the device, which has ended after it.
    """

    def __init__(
        self,
        store: BlockStore,
        kv_cache: KVCache,
        storage: KVStorage,
        groups: Mapping[KVTier | None, bytes],
        compute_ms: Callable[[int, int], float],
        on_device: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._store, self._kv, self._groups = store, kv_cache, groups
        self._places: dict[KVTier | None, Blocks | Checkpoints] = {
            tier: Blocks(kv_cache, tier, storage[tier]) for tier in groups if tier is not None
        }
        if kv_cache.states is not None:
            self._places[None] = Checkpoints(kv_cache.states, storage.states)
        self._memory = {
            tier: np.empty((place.piece, place.num_bytes), np.uint8) for tier, place in self._places.items()
        }
        self._compute_ms, self._on_device = compute_ms, on_device
        self._left: dict[tuple[KVTier | None, BlockHash], int] = {}  # items to write -> time of their use
        self._num_held = dict.fromkeys(self._places, 0)
        self._reading: _Read | None = None
        self._num_jobs = self._num_lost_bytes = self._num_hit_tokens = 0
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
    def counters(self) -> DiskCounters:
        store = self._store
        dropped_bytes = store.dropped_bytes + self._num_lost_bytes
        return DiskCounters(store.read_bytes, store.written_bytes, dropped_bytes, self._num_hit_tokens)

    def keep(self, tier: KVTier, hashes: Sequence[BlockHash]) -> None:
        """Note the full blocks of a request that leaves a tier, in the order of its tokens."""
        if tier not in self._groups or not self._store.is_writable:
            return
        now, states = time.time_ns(), self._kv.states
        # The end of a prefix is useless without its beginning, and so counts as used earlier.
        used: dict[tuple[KVTier | None, BlockHash], int] = {
            (tier, block_hash): now - 1000 * depth for depth, block_hash in enumerate(hashes)
        }
        if states is not None:
            used |= {(None, each): used[tier, each] for each in hashes if states.has(each)}
        known = {key: used[item] for item in used if self._store.has(key := self._key(*item))}
        if known:
            self._submit(TOUCH, partial(self._touch, known))
        self._left |= {item: used_ns for item, used_ns in used.items() if self._key(*item) not in known}

    def brings(self, num_tokens: int, hashes: Sequence[BlockHash], tier: KVTier) -> bool:
        """Return True if blocks of a waiting request are on their way to the tier; start that if it pays.

        Args:
            hashes: The known hashes of its leading full blocks.
        """
        if (read := self._reading) is not None:
            return read.tier == tier and read.hashes[-1] in hashes
        if tier not in self._groups or self._is_closed:
            return False
        size, states = self._kv.block_size, self._kv.states
        usable = hashes[: (num_tokens - 1) // size]
        begin = end = num_usable = self._kv.num_leading(usable, tier)
        while end < len(usable) and self._store.has(self._key(tier, usable[end])):
            end += 1
        is_state_missing = False
        if states is not None:
            num_usable = states.longest(usable[:begin])
            while end > num_usable and not states.has(usable[end - 1]):
                if is_state_missing := self._store.has(self._key(None, usable[end - 1])):
                    break
                end -= 1
        num_bytes = max(end - begin, 0) * self._places[tier].num_bytes
        num_bytes += self._places[None].num_bytes if is_state_missing else 0
        read_ms = 1e3 * num_bytes / self._bytes_per_s
        if end <= num_usable or read_ms >= self._compute_ms(num_usable * size, end * size):
            return False
        name = f"disk {next(self._numbers)}"
        there = self._kv.expect(name, usable[:end], tier, self._kv.blocks_for(num_tokens) - end)
        if there is None:
            return False
        slot = states.expect(name) if states is not None and is_state_missing else None
        if is_state_missing and slot is None:
            self._kv.let_go(name)
            return False
        blocks = self._kv.block_table(name).tolist()
        self._reading = _Read(name, tier, usable[:end], blocks, slot, num_usable, there, there)
        return True

    def look(self, num_under_way: int) -> bool:
        """Publish blocks that have arrived, and start further work; return True if work has ended.

        Args:
            num_under_way: Number of iterations that are running.
        """
        has_ended = self._finish()
        if (read := self._reading) is not None and not read.has_started:
            read.num_looks += 1
            # Iterations that run since before the admission may still write to the blocks' earlier content.
            if not num_under_way or read.num_looks > MOST_UNDER_WAY:
                self._start(read)
        if self._left:
            self._start_writes()
        return has_ended

    def wait(self) -> bool:
        """Wait a moment for blocks; return False if there is nothing to wait for. No iteration is running."""
        if (read := self._reading) is not None and not read.has_started:
            self._start(read)
        if not self._num_jobs:
            return False
        self._has_ended.wait(WAIT_S)
        self._has_ended.clear()
        self._finish()
        return True

    def close(self) -> None:
        """Keep the rest, and end the thread."""
        self._is_closed = True
        end_s = time.monotonic() + CLOSE_S
        while (self._left or self._num_jobs) and time.monotonic() < end_s:
            self.look(0)
            if not self.wait():
                break
        self._left.clear()
        self._submit(STOP, lambda: None)
        self._thread.join(JOIN_S)

    def _key(self, tier: KVTier | None, block_hash: BlockHash) -> Key:
        return Key(self._groups[tier], block_hash)

    def _submit(self, priority: int, job: Job, end: Job | None = None) -> None:
        self._num_jobs += 1
        self._jobs.put((priority, next(self._numbers), job, end or (lambda: None)))

    def _finish(self) -> bool:
        """Run the callbacks of finished jobs on the engine's thread; return False if none had finished."""
        num_jobs = self._num_jobs
        while self._ends:
            self._num_jobs -= 1
            self._ends.popleft()()
        return self._num_jobs != num_jobs

    def _start(self, read: _Read) -> None:
        read.has_started = True
        for begin in range(read.begin, len(read.blocks), self._places[read.tier].piece):
            self._submit(READ, partial(self._read_blocks, read, begin))
        self._submit(READ, partial(self._read_state, read), partial(self._end_read, read))

    def _end_read(self, read: _Read) -> None:
        size, num_usable = self._kv.block_size, read.end
        self._kv.commit(read.name, read.hashes, read.end * size)
        self._kv.let_go(read.name)
        if (states := self._kv.states) is not None:
            if read.has_state:
                states.arrived(read.name, read.hashes[-1])
            states.let_go(read.name)
            num_usable = states.longest(read.hashes[: read.end])
        self._num_hit_tokens += max(num_usable - read.num_usable, 0) * size
        self._reading = None

    def _start_writes(self) -> None:
        """Write the items that left first."""
        if not self._store.is_writable:
            self._left.clear()
            return
        for tier, place in self._places.items():
            if place.num_more(self._num_held[tier]) <= 0:
                continue
            left = deque(item for item in self._left if item[0] == tier)
            while left and (num_more := place.num_more(self._num_held[tier])) > 0:
                items = [left.popleft() for _ in range(min(num_more, place.piece, len(left)))]
                used = {block_hash: self._left.pop((there, block_hash)) for there, block_hash in items}
                name = f"disk {next(self._numbers)}"
                found = place.hold(name, list(used))
                self._num_lost_bytes += (len(used) - len(found)) * place.num_bytes
                self._num_held[tier] += len(found)
                keys = {self._key(tier, each): used[each] for each in found}
                job = partial(self._write, tier, keys, list(found.values()))
                self._submit(WRITE, job, partial(self._end_write, tier, name, len(found)))

    def _end_write(self, tier: KVTier | None, name: str, num_held: int) -> None:
        self._places[tier].let_go(name)
        self._num_held[tier] -= num_held

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

    def _read_blocks(self, read: _Read, begin: int) -> None:
        if read.end < begin:  # an earlier block is missing
            return
        hashes = read.hashes[begin : begin + self._places[read.tier].piece]
        keys = [self._key(read.tier, each) for each in hashes]
        read.end += self._read(read.tier, keys, read.blocks[begin : begin + len(keys)], begin)

    def _read_state(self, read: _Read) -> None:
        if read.slot is not None and read.end == len(read.hashes):
            key = self._key(None, read.hashes[-1])
            read.has_state = bool(self._read(None, [key], [read.slot], len(read.hashes)))

    def _read(self, tier: KVTier | None, keys: Sequence[Key], items: Sequence[int], depth: int) -> int:
        """Read items up to the first one that is missing; return their number."""
        started_s, now = time.perf_counter(), time.time_ns() - 1000 * depth
        place, memory, num_read = self._places[tier], self._memory[tier], 0
        for content, key in zip(memory, keys, strict=False):
            if not self._store.read(key, content.data):
                break
            self._store.touch(key, now - 1000 * num_read)
            num_read += 1
        if num_read:
            place.put(items[:num_read], memory[:num_read])
            rate = num_read * place.num_bytes / (time.perf_counter() - started_s)
            self._bytes_per_s += (rate - self._bytes_per_s) / 4
        return num_read

    def _write(self, tier: KVTier | None, keys: Mapping[Key, int], items: Sequence[int]) -> None:
        if not items or not self._store.is_writable:
            return
        memory = self._memory[tier]
        self._places[tier].take(items, memory[: len(items)])
        for content, (key, used_ns) in zip(memory, keys.items(), strict=False):
            self._store.write(key, content.data, used_ns)

    def _touch(self, used: Mapping[Key, int]) -> None:
        for key, used_ns in used.items():
            self._store.touch(key, used_ns)
