"""Live views of a running engine match its counters, and cost nothing without a viewer."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB_SIZE, save_checkpoint
from cost_models import machine

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.live import LiveView, Phase
from neo_desktop.engine.predict.cost_model import TableCostModel

NUM_REQUESTS = 6
PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def make_engine(checkpoint: Path, policy: str, cost_model: TableCostModel | None = None) -> Engine:
    return Engine.from_pretrained(
        checkpoint,
        device="cpu",
        policy=policy,
        gpu_cache_tokens=160,
        cpu_cache_tokens=1600,
        cost_model=cost_model or machine(num_layers=2),
        max_batch_requests=8,
    )


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCAB_SIZE, (30,), generator=generator).tolist() for _ in range(NUM_REQUESTS)]


def views(engine: Engine) -> Iterator[LiveView]:
    """Take a view before every iteration and one at the end."""
    for index, prompt in enumerate(prompts()):
        engine.add(str(index), engine.prepare(prompt, PARAMS))
    while engine.has_work:
        yield engine.live_view()
        engine.step()
    yield engine.live_view()


@pytest.mark.parametrize("policy", ["auto", "neo", "gpu-only", "fastdecode"])
def test_what_is_told_agrees_with_what_is_counted(checkpoint: Path, policy: str) -> None:
    with make_engine(checkpoint, policy) as engine:
        seen = list(views(engine))
    tiers = set()
    for view in seen:
        stats = view.stats
        assert len(view.requests) == stats.num_running
        assert len(view.requests) + stats.num_waiting <= NUM_REQUESTS
        arrivals = [request.arrival for request in view.requests]
        assert arrivals == sorted(set(arrivals))
        for tier, pool in stats.pools.items():
            there = [request for request in view.requests if request.tier == tier]
            assert sum(request.num_computed_tokens for request in there) <= view.capacity_tokens(
                tier.in_host_memory
            )
            assert bool(there) == bool(pool.num_used_blocks)
        for request in view.requests:
            is_prefilling = request.phase is Phase.PREFILLING
            assert is_prefilling == (request.num_tokens - request.num_computed_tokens > 1)
        tiers |= {request.tier for request in view.requests}
        assert view.is_gpu_imitated
        assert view.device_name is None
    first, last = seen[0], seen[-1]
    assert tiers == ({KVTier.DEVICE, KVTier.HOST} if policy in ("auto", "neo") else {*last.stats.pools})
    assert first.iterations == ()
    assert last.requests == ()
    noted = {id(one): one for view in seen for one in view.iterations}.values()
    assert len(noted) == last.stats.num_iterations
    assert sum(one.num_outputs for one in noted) == last.stats.num_output_tokens
    drafts = last.stats.speculative
    assert drafts is not None
    num_wrong = drafts.num_drafted_tokens - drafts.num_accepted_tokens
    num_cpu_rows = sum(one.num_cpu_decodes for one in noted)
    assert last.stats.num_cpu_decodes <= num_cpu_rows <= last.stats.num_cpu_decodes + num_wrong


def test_the_timeline_of_the_last_iteration_has_both_sub_batches_and_all_lanes(checkpoint: Path) -> None:
    with make_engine(checkpoint, "neo") as engine:
        seen = list(views(engine))
    view = next(v for v in seen if {span.stage.sub_batch for span in v.spans} >= {0, 1})
    assert {span.lane for span in view.spans} >= {"device", "to-host", "cpu", "to-device"}
    assert len({span.iteration for span in view.spans}) == 1
    assert view.spans_age_s >= 0
    assert view.overlap is not None
    assert 0 <= view.overlap <= 1
    with make_engine(checkpoint, "gpu-only") as engine:
        alone = list(views(engine))[-1]
    assert {span.lane for span in alone.spans} == {"device"}
    assert alone.overlap is None


def test_predictions_and_the_bound_are_told_where_there_are_tables(checkpoint: Path) -> None:
    with make_engine(checkpoint, "neo") as engine:
        with_tables = list(views(engine))[-1]
    assert with_tables.mean_error is not None
    limit = with_tables.limit
    assert limit is not None
    assert limit.gpu_alone_ms is not None
    assert limit.real_ms == pytest.approx(sum(one.total_ms for one in with_tables.iterations))
    assert 0 < limit.least_ms <= limit.gpu_alone_ms
    assert limit.share == limit.least_ms / limit.real_ms

    with make_engine(checkpoint, "gpu-only") as engine:
        engine._cost_model = None
        without = list(views(engine))[-1]
    assert without.limit is None
