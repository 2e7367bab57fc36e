"""Caches return memory to the system while the engine runs; tokens stay the same, no request is lost."""

import errno
import logging
import queue
import subprocess
import sys
from collections import defaultdict
from threading import Thread

import pytest
from engine_fakes import FakeExecutor, free_blocks, make_request, reference_output
from hypothesis import given
from hypothesis import strategies as st
from kv_invariants import check_kv
from reserve_case import MEASURED_TIERS, PARAMS, PROMPTS, RESERVE, Machine, tiny_engine

from neo_desktop import SamplingParams
from neo_desktop.app.engines import loop
from neo_desktop.app.engines.messages import Event, Gained, Stop
from neo_desktop.engine.host_reserve import PLENTY_S, HostReserve, reserve_bytes
from neo_desktop.engine.iterations import Iterations
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv.layout import BLOCK_SIZE, BLOCKS_PER_RUN
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.live import Notes
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.request import Request
from neo_desktop.engine.schedule.policies import POLICIES
from neo_desktop.engine.schedule.scheduler import Scheduler, SchedulerLimits


class FakePool:
    """Blocks of one byte that lose their content when released."""

    block_bytes = 1

    def __init__(self, num_blocks: int, slots: dict[int, int], block_size: int) -> None:
        self.num_blocks = num_blocks
        self._slots = slots
        self._block_size = block_size
        self.num_returns = 0

    def give_back(self, num_blocks: int) -> int:
        gone = [slot for slot in self._slots if slot >= num_blocks * self._block_size]
        for slot in gone:
            del self._slots[slot]
        self.num_returns += 1
        return len(gone) // self._block_size


@given(
    jobs=st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(1, 30)),
        min_size=1,
        max_size=10,
    ),
    policy=st.sampled_from(sorted(MEASURED_TIERS)),
    sizes=st.lists(st.integers(13, 40), min_size=3, max_size=3),
    available=st.lists(st.integers(RESERVE - 60, 2 * RESERVE + 60), max_size=60),
)
def test_every_request_ends_with_its_own_tokens_however_the_caches_change(
    jobs: list[tuple[list[int], int]], policy: str, sizes: list[int], available: list[int]
) -> None:
    """Released memory of any cache, including the imitated GPU's, is never read, or tokens would change."""
    block_size = 4
    num_blocks = dict(zip(MEASURED_TIERS[policy], sizes, strict=False))
    kv = KVCache(num_blocks, block_size)
    scheduler = Scheduler(kv, POLICIES[policy], SchedulerLimits(16, 8))
    executor = FakeExecutor(block_size, 16)
    pools = {tier: FakePool(count, executor.slots[tier], block_size) for tier, count in num_blocks.items()}
    machine = Machine(available)
    storage = KVStorage(pools)  # type: ignore[arg-type]
    reserve = HostReserve(scheduler, kv, storage, RESERVE, machine.clock, machine.available)
    iterations = Iterations(scheduler, executor, None, Notes(), reserve=reserve)
    requests: list[Request] = []
    for arrival, (prompt, max_tokens) in enumerate(jobs):
        params = SamplingParams(max_tokens=max_tokens)
        requests.append(make_request(str(arrival), prompt, params, arrival=arrival))
        scheduler.add(requests[-1])
    tokens: dict[str, list[int]] = defaultdict(list)
    for _ in range(3000):
        iterations.collect()
        check_kv(kv)
        for output in iterations.take_outputs():
            tokens[output.request_id] += [token.token_id for token in output.tokens]
        if not list(scheduler.queues):
            break
    for request in requests:
        assert tokens[request.owner_id] == reference_output(request, request.params.max_tokens or 0)
    for tier, usage in kv.usage().items():
        assert usage.num_used_blocks == 0
        assert usage.num_blocks + usage.num_given_back_blocks == num_blocks[tier]


def test_a_cache_shrinks_by_what_is_missing_and_grows_after_a_while_of_plenty() -> None:
    kv = KVCache({KVTier.HOST: 400}, BLOCK_SIZE)
    scheduler = Scheduler(kv, POLICIES["fastdecode"], SchedulerLimits(16, 8))
    pool = FakePool(400, {}, BLOCK_SIZE)
    now_s, available = 0.0, RESERVE
    storage = KVStorage({KVTier.HOST: pool})  # type: ignore[dict-item]
    reserve = HostReserve(scheduler, kv, storage, RESERVE, lambda: now_s, lambda: available)

    def looks(seconds: float) -> int:
        nonlocal now_s
        for _ in range(int(seconds)):
            now_s += 1.0
            reserve.look()
        return kv.size(KVTier.HOST).limit

    available = RESERVE - 100
    assert looks(1) == 400, "nothing was ever written there"
    assert kv.admit("a", 300 * BLOCK_SIZE, [], KVTier.HOST) == 0
    kv.free("a")
    assert looks(1) == 200
    assert pool.num_returns == 1
    available = 2 * RESERVE - 1
    assert looks(60) == 200, "enough is not plenty"
    available = 2 * RESERVE + 100
    assert looks(5) == 200
    available = RESERVE
    looks(1)
    available = 2 * RESERVE + 100
    assert looks(PLENTY_S) == 200, "plenty has to last"
    assert looks(2) == 300
    assert looks(10 * PLENTY_S) == 400
    available = 0
    assert looks(30) == 400 // 16 // BLOCKS_PER_RUN * BLOCKS_PER_RUN + BLOCKS_PER_RUN
    assert free_blocks(kv) == {KVTier.HOST: kv.size(KVTier.HOST).limit}


@pytest.mark.parametrize(("policy", "dtype"), [("auto", "auto"), ("fastdecode", "auto"), ("neo", "int8")])
def test_tokens_stay_the_same_while_memory_goes_and_comes(
    policy: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    with tiny_engine(policy, dtype) as engine:
        expected = [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]
    available = [RESERVE - 10**5 if i % 4 < 2 else 10**6 for i in range(10_000)]
    with tiny_engine(policy, dtype, Machine(available)) as engine, caplog.at_level(logging.INFO):
        outputs = [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]
        check_kv(engine._kv_cache)
        for what in ("gave back", "again"):
            is_told = sum(what in record.message for record in caplog.records) > 2
            assert is_told, "the test did not reach what it is about"
        if dtype == "int8":  # recomputed requests round their rows at other times
            assert [len(tokens) for tokens in outputs] == [len(tokens) for tokens in expected]
        else:
            assert outputs == expected


def test_an_engine_that_nobody_asks_gives_memory_back_and_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "REST_S", 0.01)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    machine = Machine([])
    with tiny_engine("fastdecode", machine=machine) as engine:
        engine.generate(PROMPTS, PARAMS)
        machine.available = lambda: 0  # type: ignore[method-assign]
        engine._reserve._available = machine.available  # type: ignore[union-attr]
        engine_loop = loop.EngineLoop(engine, lambda some: [events.put(event) for event in some])
        thread = Thread(target=engine_loop.run)
        thread.start()
        told = events.get(timeout=60.0)
        engine_loop.send(Stop())
        thread.join()
    assert isinstance(told, Gained)
    assert told.stats.pools[KVTier.HOST].num_given_back_blocks > 0


RESIDENT_MEMORY = """
import psutil, torch
from types import SimpleNamespace
from neo_desktop.engine.kv.host_layer import HostLayer

dtype = getattr(torch, "{dtype}")
shape = SimpleNamespace(
    num_layers=4, num_kv_heads=4, num_heads=4, head_dim=64, attention_sinks=False, kv_parts={kv_parts}
)
parts = HostLayer.allocate(shape, 1024, 16, dtype, torch.device("cpu"))
memory = psutil.Process().memory_info
num_bytes = sum(part.nbytes for part in parts)

def fill():
    for part in parts:
        part.fill_(3)

fill()
full = memory().rss
given = HostLayer.give_back(parts, 256)
less = memory().rss
assert abs(given / num_bytes - 0.75) < 0.01, (given, num_bytes)
assert 0.9 * given < full - less < 1.1 * given, (full, less, given)
for part in parts:
    kept = part.shape[1] // 4
    assert (part[:, :kept] == 3).all()
fill()
assert memory().rss - less > 0.9 * given
for part in parts:
    assert (part == 3).all()
"""


@pytest.mark.parametrize(("dtype", "kv_parts"), [("float32", 2), ("int8", 1)])
def test_the_system_has_what_was_given_back_until_it_is_used_again(dtype: str, kv_parts: int) -> None:
    code = RESIDENT_MEMORY.format(dtype=dtype, kv_parts=kv_parts)
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_an_engine_goes_on_when_memory_cannot_be_looked_at() -> None:
    machine = Machine([])

    def refuse() -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    machine.available = refuse  # type: ignore[method-assign]
    with tiny_engine("fastdecode", machine=machine) as engine:
        assert not engine.rest()
        assert [len(output.token_ids) for output in engine.generate(PROMPTS, PARAMS)] == [40] * 8


def test_the_reserve_is_a_share_of_the_memory_unless_it_is_said() -> None:
    assert 0 < (reserve_bytes(EngineOptions()) or 0) <= 2 * 1024**3
    assert reserve_bytes(EngineOptions(host_reserve_gib=0.5)) == 1024**3 // 2
    assert reserve_bytes(EngineOptions(host_reserve_gib=0.0)) is None
    assert reserve_bytes(EngineOptions(tensor_parallel=2)) is None
