"""Async decodes on attention workers: planned only if they pay, and without lost tokens."""

import random
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from async_policy import AllAsync
from cost_models import machine
from engine_fakes import FakeExecutor, free_blocks, make_request, reference_output
from hypothesis import given
from hypothesis import strategies as st
from idle import assert_is_idle
from kv_invariants import check_kv
from seeds import first
from worker_process import WorkerProcess
from worker_requests import ONE, Answers, expected, make_engine, prompts
from workers import running_worker

from neo_desktop import Engine
from neo_desktop.engine.batch import MAX_ASYNC_DECODES
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.predict.corrected import CorrectedCostModel
from neo_desktop.engine.predict.cost_model import Curve, Network, Surface, TableCostModel
from neo_desktop.engine.predict.estimate import BatchShape, Decodes, IterationShape, iteration_ms
from neo_desktop.engine.profiling.workers import divided
from neo_desktop.engine.request import Request
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.schedule.batch_builder import BatchBuilder, HostQueue
from neo_desktop.engine.schedule.partition import CandidateGenerator
from neo_desktop.engine.schedule.policies import POLICIES, Policy
from neo_desktop.engine.schedule.scheduler import Scheduler, SchedulerLimits

TWO = KVTier.worker(2)
WORKERS = ONE, TWO
EVERYWHERE = (*MEASURED_TIERS, *WORKERS)
BLOCK_SIZE = 4
LIMITS = SchedulerLimits(max_batch_tokens=512, max_batch_requests=256, max_token_ms=1e9)
NONE = Decodes(0, 0)


def far(round_trip_ms: float = 5.0, sending_ms: float = 0.001, **figures: float) -> TableCostModel:
    """Return the costs of a machine with two workers behind a slow network."""
    cost = machine(tiers=EVERYWHERE, **figures)  # type: ignore[arg-type]
    ways = Curve((1, 64), (round_trip_ms + sending_ms, round_trip_ms + 64 * sending_ms))
    network = Network(ways, Curve((1, 64), (sending_ms, 64 * sending_ms)))
    return replace(cost, networks=dict.fromkeys(WORKERS, network))


def on_device(decodes: int) -> BatchShape:
    return BatchShape().plus({KVTier.DEVICE: Decodes(decodes, decodes * 500)})


def test_the_round_trip_of_a_worker_is_paid_once_in_an_iteration_and_not_in_each_layer() -> None:
    cost, load = far(), on_device(16)
    alone_ms = iteration_ms(cost, IterationShape((load,)))
    generator = CandidateGenerator(BatchBuilder(cost, LIMITS, 0, load, HostQueue([(ONE, 500)] * 40)))
    assert generator.together().predicted_ms > alone_ms + cost.num_layers * 5.0
    (apart,) = generator.with_async(generator.front(0, 0))
    assert apart.shape.async_decodes == {ONE: Decodes(40, 40 * 500)}
    assert alone_ms < apart.predicted_ms < alone_ms + 3 * 5.0


queues = st.lists(st.tuples(st.sampled_from((KVTier.HOST, *WORKERS)), st.integers(1, 3000)), max_size=60)


@given(
    waiting=queues,
    under_way=queues,
    decodes=st.integers(1, 40),
    taken=st.floats(0, 1),
    round_trip_ms=st.sampled_from((0.0, 0.1, 3.0)),
    sending_ms=st.sampled_from((0.0, 0.01, 1.0)),
    workers_only=st.booleans(),
)
def test_who_is_under_way_goes_on_and_nobody_goes_who_is_not_there(
    waiting: list[tuple[KVTier, int]],
    under_way: list[tuple[KVTier, int]],
    decodes: int,
    taken: float,
    round_trip_ms: float,
    sending_ms: float,
    workers_only: bool,
) -> None:
    cost = far(round_trip_ms, sending_ms)
    queue, begun = HostQueue(waiting), HostQueue(under_way).decodes(range(len(under_way)))
    builder = BatchBuilder(cost, LIMITS, 0, on_device(decodes), queue, async_decodes=begun)
    generator = CandidateGenerator(builder)
    num_taken = int(taken * len(waiting))
    split = generator.front(num_taken // 2, num_taken)
    found = list(generator.with_async(split, workers_only=workers_only))
    assert len(found) <= 1
    assert bool(found) >= bool(under_way)
    rest = queue.decodes(range(num_taken, len(waiting)))
    for each in found:
        assert each.num_async <= max(MAX_ASYNC_DECODES * cost.num_layers, len(under_way))
        for tier in (KVTier.HOST, *WORKERS):
            least = begun[tier].requests if tier in begun else 0
            more = rest[tier].requests if tier in rest else 0
            if workers_only and not tier.is_remote:
                more = 0
            assert least <= each.shape.async_decodes.get(tier, NONE).requests <= least + more


@pytest.mark.parametrize("num_seeds", first([8, 20]))
@pytest.mark.parametrize("policy", ["own pace", "apex", "auto"])
def test_whatever_happens_to_workers_every_request_ends_with_its_own_tokens(
    policy: str, num_seeds: int
) -> None:
    """Workers fail in mid-token and return; requests are aborted, moved and preempted."""
    num_async = num_lost = 0
    for seed in range(num_seeds):
        rng = random.Random(seed)
        own = AllAsync("own pace", EVERYWHERE)
        chosen: Policy = own if policy == "own pace" else POLICIES[policy].with_tiers(WORKERS)
        cost = far(rng.choice((0.1, 5.0)), num_layers=rng.randint(1, 6))
        run = _Run(rng, chosen, cost)
        for _ in range(12):
            run.add([rng.randrange(3) for _ in range(rng.randint(1, 20))], rng.randint(1, 30))
        run.end()
        num_async += run.scheduler.counters.num_async_decodes
        num_lost += run.num_lost_in_mid_token
    assert num_async > 50
    assert num_lost > 0


class _Run:
    """A scheduler over a fake model, with workers that come and go at random."""

    def __init__(self, rng: random.Random, policy: Policy, cost: TableCostModel) -> None:
        self.rng = rng
        self.num_blocks = {
            KVTier.DEVICE: 20,
            KVTier.HOST: rng.choice((0, 20)),
            ONE: 30,
            TWO: rng.choice((0, 30)),
        }
        self.kv = KVCache(self.num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(self.kv, policy, SchedulerLimits(16, 8), cost)
        self.executor = FakeExecutor(BLOCK_SIZE, 16)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.lost: set[KVTier] = set()
        self.num_lost_in_mid_token = 0

    def add(self, prompt: list[int], max_tokens: int) -> None:
        name = str(len(self.requests))
        self.requests[name] = make_request(
            name, prompt, SamplingParams(max_tokens=max_tokens), arrival=len(self.requests)
        )
        self.tokens[name] = []
        self.scheduler.add(self.requests[name])

    def _step(self) -> bool:
        rng, scheduler = self.rng, self.scheduler
        plan = scheduler.schedule()
        check_kv(self.kv)
        if plan is None:
            return False
        if rng.random() < 0.3:
            scheduler.look_ahead()
        if rng.random() < 0.1:
            tier = rng.choice([each for each in WORKERS if self.num_blocks[each]])
            if tier not in self.lost:
                if rng.random() < 0.5:
                    self.executor.execute(plan)  # the failed iteration got that far
                standing = {each.request_id for group in plan.async_decodes[:-1] for each in group if each}
                names = {name for name in standing if self.kv.tier_of(name) == tier}
                self.num_lost_in_mid_token += bool(names)
                scheduler.lose(tier)
                self.executor.slots[tier].clear()
                self.lost.add(tier)
                return True
        for request in scheduler.update(self.executor.execute(plan)):
            output = request.take_output()
            self.tokens[output.request_id] += [token.token_id for token in output.tokens]
        if rng.random() < 0.02 and (running := scheduler.queues.placed):
            victim = rng.choice(running)[1].owner_id
            scheduler.abort(victim)
            self.aborted.add(victim)
        if self.lost and rng.random() < 0.1:
            self._open()
        return True

    def _open(self) -> None:
        tier = self.lost.pop()
        self.scheduler.open(tier, self.num_blocks[tier])

    def end(self) -> None:
        for _ in range(4000):
            if not self._step():
                break
        else:
            raise AssertionError("the requests do not end")
        while self.lost:
            self._open()
        for name, request in self.requests.items():
            count = len(self.tokens[name]) if name in self.aborted else request.params.max_tokens or 0
            assert self.tokens[name] == reference_output(request, count)
        assert free_blocks(self.kv) == self.num_blocks


def test_what_grows_with_the_context_is_attention_and_the_rest_the_way() -> None:
    """A round trip takes 1 ms, a request's rows 0.01 ms, a token of its context 0.001 ms."""
    requests, contexts = (1, 4, 16), (64, 1024)
    measured = Surface(
        requests, contexts, [[1.0 + 0.01 * n + 0.001 * n * c for c in contexts] for n in requests]
    )
    attention, network = divided(measured, 0.6)
    for n, context in ((1, 64), (4, 500), (16, 1024), (9, 2000)):
        assert attention(n, context) == pytest.approx(0.001 * n * context)
        assert network.all(n) == pytest.approx(1.0 + 0.01 * n)
        assert network.sending(n) == pytest.approx(0.6 * 0.01 * (n - 1))


# The whole engine.


@pytest.fixture
def all_async(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "neo", AllAsync("neo", MEASURED_TIERS))


def assert_async_answers(engine: Engine, checkpoint: Path) -> None:
    batch = prompts()
    assert Answers(engine, batch).end() == expected(checkpoint, batch)
    assert engine.stats().num_async_decodes > 0
    assert_is_idle(engine)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("policy", "round_trip_ms"), [("apex", 5.0), ("auto", 1.0)])
def test_policies_plan_it_where_workers_are_far_and_give_the_tokens_of_the_model_alone(
    stack: ExitStack,
    checkpoints: dict[str, Path],
    secret: Path,
    policy: str,
    round_trip_ms: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cost = far(round_trip_ms)
    measured = ({tier: cost.attention[tier] for tier in WORKERS}, dict(cost.networks))
    monkeypatch.setattr("neo_desktop.engine.setup.measured_workers", lambda *_: measured)
    monkeypatch.setattr(CorrectedCostModel, "learn", lambda *_: None)  # plans stay those of that machine
    workers = ",".join(str(stack.enter_context(running_worker())[1]) for _ in WORKERS)
    engine = stack.enter_context(make_engine(checkpoints["llama"], secret, workers, policy=policy))
    assert_async_answers(engine, checkpoints["llama"])


@pytest.mark.usefixtures("all_async")
def test_async_decodes_of_several_workers_have_the_same_tokens(
    stack: ExitStack, checkpoints: dict[str, Path], secret: Path
) -> None:
    workers = ",".join(str(stack.enter_context(running_worker())[1]) for _ in WORKERS)
    engine = stack.enter_context(make_engine(checkpoints["llama"], secret, workers))
    assert_async_answers(engine, checkpoints["llama"])


@pytest.mark.usefixtures("all_async")
def test_a_worker_killed_in_the_middle_of_tokens_loses_none(
    checkpoints: dict[str, Path], secret: Path
) -> None:
    """Its requests restart elsewhere; requests with async tokens on other workers restart as well."""
    batch = prompts()
    with WorkerProcess(secret) as first, WorkerProcess(secret) as second:
        workers = f"{first.address},{second.address}"
        with make_engine(checkpoints["llama"], secret, workers) as engine:
            answers = Answers(engine, batch)

            def is_in_mid_token() -> bool:
                queues = engine._scheduler.queues
                is_async = any(each in queues.async_groups for each in queues.running[ONE])
                return is_async and len(answers.tokens["0"]) > 5

            answers.until(is_in_mid_token)
            assert is_in_mid_token()
            first.kill()
            answers.until(lambda: engine.stats().pools[ONE].num_blocks == 0)
            with WorkerProcess(secret, first.address.port):
                assert answers.end() == expected(checkpoints["llama"], batch)
            assert engine.stats().num_async_decodes > 0
            assert_is_idle(engine)
