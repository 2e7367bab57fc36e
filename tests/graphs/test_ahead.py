"""A decode iteration starts or is prepared before the last tokens are read; results do not change."""

import itertools
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from graph_case import make_executor
from imitated_streams import ImitatedBackend
from pipeline_case import tiny_model
from seeds import seeds

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.batch import IterationPlan
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.execute import model_runner
from neo_desktop.engine.execute.executor import Wait
from neo_desktop.engine.execute.graphs import AnyProgram
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.host_reserve import HostReserve
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.loading import LoadedModel
from neo_desktop.engine.request import RequestOutput
from neo_desktop.engine.schedule.policies import get_policy
from neo_desktop.engine.schedule.scheduler import Scheduler, SchedulerLimits
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import Dense
from neo_desktop.models.tokenizer import ByteTokenizer

Tokens = dict[str, tuple[list[int], str | None]]  # request -> its tokens, and its finish reason
NUM_BLOCKS = 24  # as in `graph_case`


pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(scope="module")
def model() -> Decoder:
    decoder = tiny_model((None, 5), form=Dense(uses_tiles=False))
    decoder.config = replace(decoder.config, max_context_tokens=128)
    return decoder


@dataclass(frozen=True)
class Job:
    """A request with its arrival and optional abort, as iteration numbers."""

    prompt: list[int]
    params: SamplingParams
    arrival: int
    abort: int | None


def make_engine(
    model: Decoder, backend: ImitatedBackend, policy: str = "gpu-only", num_blocks: int = NUM_BLOCKS
) -> tuple[Engine, ModelRunner]:
    tiers = (KVTier.DEVICE,) if policy == "gpu-only" else MEASURED_TIERS
    executor, _ = make_executor(model, tiers=tiers, backend=backend)
    kv = KVCache(dict.fromkeys(tiers, num_blocks), 16)
    scheduler = Scheduler(kv, get_policy(policy), SchedulerLimits(64, 6), None)
    loaded = LoadedModel("tiny", model.config, model, ByteTokenizer(), Streams(torch.device("cpu")))
    return Engine(loaded, scheduler, kv, executor, policy), executor


def note_plans(executor: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[IterationPlan]:
    start, plans = executor.start, list[IterationPlan]()

    def started(plan: IterationPlan) -> Wait:
        plans.append(plan)
        return start(plan)

    monkeypatch.setattr(executor, "start", started)
    return plans


def run(engine: Engine, jobs: Mapping[str, Job]) -> Tokens:
    seen: Tokens = {name: ([], None) for name in jobs}

    def take(outputs: list[RequestOutput]) -> None:
        for output in outputs:
            tokens = seen[output.request_id][0] + [token.token_id for token in output.tokens]
            seen[output.request_id] = tokens, output.finish_reason

    for iteration in range(10_000):
        for name, job in jobs.items():
            if job.arrival == iteration:
                engine.add(name, engine.prepare(job.prompt, job.params))
            if job.abort == iteration:
                take(engine.abort(name))
        take(engine.step())
        if not engine.has_work and iteration > max(max(job.arrival, job.abort or 0) for job in jobs.values()):
            return seen
    raise AssertionError("the requests do not end")


def random_jobs(rng: random.Random) -> dict[str, Job]:
    shared = [rng.randrange(257) for _ in range(40)]

    def job() -> Job:
        params = SamplingParams(
            max_tokens=rng.randint(1, 24),
            temperature=rng.choice([0.0, 0.0, 1.0]),
            seed=rng.randrange(100),
            ignore_eos=True,
            stop_token_ids=rng.sample(range(257), rng.choice([0, 40])),  # ends are unpredictable
            presence_penalty=rng.choice([0.0, 0.0, 0.0, 1.5]),
            logprobs=rng.choice([None, None, 2]),
        )
        own = [rng.randrange(257) for _ in range(rng.randint(1, 30))]
        prompt = shared[: rng.choice([0, 16, 37])] + own
        arrival = rng.randrange(30)
        return Job(prompt, params, arrival, rng.choice([None, None, None, arrival + rng.randint(1, 12)]))

    return {f"job {number}": job() for number in range(10)}


@pytest.mark.parametrize("seed", seeds(2, 4))
def test_graphs_do_not_notice_that_the_cpu_cache_gives_memory_back(
    model: Decoder, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The cache shrinks between iterations; the next one does not start ahead, and addresses stay."""
    rng = random.Random(seed)
    jobs = {name: replace(job, abort=None) for name, job in random_jobs(rng).items()}
    results = []
    for has_reserve in (False, True):
        backend = ImitatedBackend(seed, num_queues=rng.choice([None, 1, 3]))
        executor, _ = make_executor(model, tiers=MEASURED_TIERS, backend=backend)
        kv = KVCache({KVTier.DEVICE: 10, KVTier.HOST: NUM_BLOCKS}, 16)
        scheduler = Scheduler(kv, get_policy("neo"), SchedulerLimits(64, 6), None)
        loaded = LoadedModel("tiny", model.config, model, ByteTokenizer(), Streams(torch.device("cpu")))
        ticks = itertools.count()
        available = partial(rng.choice, [0, 1000, 10**9])
        reserve = HostReserve(
            scheduler, kv, executor._storage, 1000, lambda t=ticks: 4.0 * next(t), available
        )
        engine = Engine(loaded, scheduler, kv, executor, "neo", reserve=reserve if has_reserve else None)
        with caplog.at_level(logging.INFO):
            results.append(run(engine, jobs))
        assert any("gave back" in record.message for record in caplog.records) == has_reserve
        engine.close()
    assert results[0] == results[1]


@pytest.mark.parametrize("seed", seeds(3, 8))
def test_tokens_are_those_of_iterations_one_after_the_other(
    model: Decoder, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests arrive, end and are aborted at any time, with all kinds of sampling and too little memory."""
    rng = random.Random(seed)
    jobs, num_blocks = random_jobs(rng), rng.choice([NUM_BLOCKS, 10])
    policy = ("neo", "gpu-only", "fastdecode", "gpu-only")[seed % 4]  # sometimes the CPU takes part
    results = []
    for runs_ahead in (True, False):
        backend = ImitatedBackend(seed, num_queues=rng.choice([None, 1, 3]))
        engine, executor = make_engine(model, backend, policy, num_blocks)
        plans = note_plans(executor, monkeypatch)
        if not runs_ahead:
            monkeypatch.setattr(ModelRunner, "runs_ahead", property(lambda _: False))
        results.append(run(engine, jobs))
        assert any(plan.is_ahead for plan in plans) == runs_ahead
        assert engine.stats().pools[KVTier.DEVICE].num_used_blocks == 0
        engine.close()
        monkeypatch.undo()
    ahead, one_by_one = results
    for name, job in jobs.items():
        if job.abort is None:
            assert ahead[name] == one_by_one[name]
        else:  # the number of tokens before the abort may differ
            length = min(len(ahead[name][0]), len(one_by_one[name][0]))
            assert ahead[name][0][:length] == one_by_one[name][0][:length]


def test_decodes_follow_each_other_without_anybody_reading_tokens(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every decode but the first starts ahead; prompts and requests that need earlier tokens do not."""
    engine, executor = make_engine(model, ImitatedBackend(0))
    plans = note_plans(executor, monkeypatch)
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    run(engine, {"a": Job([1, 2, 3], greedy, 0, None), "b": Job([4, 5], greedy, 6, None)})
    has_prompt = [any(not sequence.is_decode for sequence in plan.sequences) for plan in plans]
    assert [plan.is_ahead for plan in plans[1:]] == [not prompt for prompt in has_prompt[1:]]
    plans.clear()
    run(engine, {"a": Job([1, 2, 3], replace(greedy, presence_penalty=1.0), 0, None)})
    assert not any(plan.is_ahead for plan in plans)
    engine.close()


def test_decodes_of_the_cpu_are_prepared_ahead(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """They start in order, and the programs built before take their tokens from the device."""
    engine, executor = make_engine(model, ImitatedBackend(0), "fastdecode")
    plans, prepared = note_plans(executor, monkeypatch), list[IterationPlan]()
    prepare = executor.prepare
    monkeypatch.setattr(executor, "prepare", lambda plan: (prepare(plan), prepared.append(plan)))
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    run(engine, {"a": Job([1, 2, 3], greedy, 0, None)})
    assert plans[1:] == prepared
    assert len(prepared) == 11
    engine.close()


class Refusing(ImitatedBackend):
    """Backend that refuses one program, at its start or at its end."""

    refused: int | None = None
    error: RuntimeError = torch.OutOfMemoryError("no room")

    def start(self, program: AnyProgram, *, with_flags: bool, with_graphs: bool) -> bool:
        if self.num_runs == self.refused:
            self.num_runs += 1
            raise self.error
        return super().start(program, with_flags=with_flags, with_graphs=with_graphs)


@pytest.mark.sample(4)
@pytest.mark.parametrize("refused", range(3, 9))
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), torch.AcceleratorError("CUDA error: not supported")]
)
def test_an_iteration_that_cannot_start_ahead_starts_later(
    model: Decoder, refused: int, error: RuntimeError
) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    jobs = {"a": Job([1, 2, 3], params, 0, None), "b": Job([4, 5], params, 2, None)}
    expected = None
    for refuses in (False, True):
        backend = Refusing(0)
        if refuses:
            backend.refused, backend.error = refused, error
        engine, _ = make_engine(model, backend)
        tokens = run(engine, jobs)
        expected = expected or tokens
        assert tokens == expected
        engine.close()


@pytest.mark.parametrize("failing", range(4, 8))
def test_an_iteration_that_is_done_again_leaves_the_next_one_its_tokens(
    model: Decoder, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(ImitatedBackend):
        num_waits = 0

        def wait(self) -> None:
            super().wait()
            self.num_waits += 1
            if self.num_waits == failing:
                raise model_runner.OffloadStalledError("the GPU was slow")

    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    jobs = {"a": Job([1, 2, 3], params, 0, None), "b": Job([4, 5], params, 2, None)}
    results = []
    for backend in (ImitatedBackend(0), Failing(0)):
        engine, _ = make_engine(model, backend)
        results.append(run(engine, jobs))
        engine.close()
    assert results[0] == results[1]
