"""The page's live view of the engine: a sentence per case, consistent figures, no unrequested updates."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest

from neo_desktop.app import live as feeds
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.live import EngineFeed, EngineState, EngineView, notes, sentence
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, Span, Stage
from neo_desktop.engine.kv.cache import PoolUsage
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.live import LiveIteration, LiveRequest, LiveView, Phase, Rates
from neo_desktop.engine.remote.workers import WorkerState
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.schedule.policies import get_policy
from neo_desktop.engine.stats import EngineStats
from neo_desktop.ui.engine import engine_html

from .fake_engine import MODEL, FakeExecutor, make_engine

GPU, CPU = KVTier.DEVICE, KVTier.HOST
NO_WORKERS: Mapping[KVTier, WorkerState] = {}


def request(arrival: int, tier: KVTier, *, held: bool = False, prefilling: bool = False) -> LiveRequest:
    phase = Phase.PREFILLING if prefilling else Phase.DECODING
    return LiveRequest(arrival, tier, phase, 100, 40 if prefilling else 99, is_held=held)


def make_view(
    requests: Sequence[LiveRequest] = (),
    *,
    policy: str = "auto",
    waiting: int = 0,
    alone: int | None = None,
    imitated: bool = False,
    spans: tuple[Span, ...] = (),
    iterations: tuple[LiveIteration, ...] = (),
    workers: Mapping[KVTier, WorkerState] = NO_WORKERS,
    others: Sequence[KVTier] = (),
) -> LiveView:
    local = [tier for tier in get_policy(policy).tiers if not tier.is_streamed]
    pools = {tier: PoolUsage(64, 4, 2) for tier in (*local, *others, *workers)}
    stats = EngineStats(
        model="m",
        policy=policy,
        device="cpu" if imitated else "cuda",
        dtype="float16",
        gpu_sms=None if imitated else 40,
        max_context_tokens=1024,
        block_size=16,
        num_running=len(requests),
        num_running_at={},
        num_waiting=waiting,
        num_iterations=9,
        num_prompt_tokens=100,
        num_cached_tokens=10,
        num_output_tokens=50,
        num_cpu_decodes=20,
        pools=pools,
    )
    on_gpu = sum(one.tier == GPU for one in requests)
    return LiveView(
        stats=stats,
        requests=tuple(requests),
        num_gpu_alone=(on_gpu if alone is None else alone) if GPU in pools else None,
        is_gpu_imitated=imitated,
        device_name=None if imitated else "NVIDIA T4",
        weights_bytes=1000,
        rates=Rates(10.0, 20.04),
        iterations=iterations,
        spans=spans,
        workers=workers,
    )


def chats(gpu: int, cpu: int, held: int = 0) -> list[LiveRequest]:
    return [request(i, GPU) for i in range(gpu)] + [request(gpu + i, CPU, held=i < held) for i in range(cpu)]


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (
            make_view(),
            "No chat is waiting for an answer. "
            "There is room for 1,024 tokens on the GPU and 1,024 in main memory.",
        ),
        (
            make_view(chats(1, 0)),
            "1 chat: on the GPU. Nothing is offloaded.",
        ),
        (
            make_view(chats(3, 5)),
            "8 chats at once: 3 on the GPU, 5 in main memory, where the CPU attends. "
            "GPU memory alone would hold 3.",
        ),
        (
            make_view(chats(2, 4, held=3), waiting=1),
            "6 chats at once: 2 on the GPU, 4 in main memory, where the CPU attends. "
            "GPU memory alone would hold 2. 1 chat waits for room. "
            "The CPU has more to do than fits beside the GPU's work: 3 chats must wait.",
        ),
        (make_view(waiting=2), "2 chats wait for room."),
    ],
)
def test_one_sentence_says_what_offloading_does(view: LiveView, expected: str) -> None:
    assert sentence(view) == expected


STEP = LiveIteration(
    total_ms=8.0,
    predicted_ms=6.0,
    host_attention_ms=2.0,
    num_cpu_decodes=4,
    num_prompt_tokens=50,
    num_outputs=8,
    prompt_context=1250.0,
    longest_prompt=50,
    decode_context=700,
    decoded=("a",) * 7,
)


def span(lane: str, sub_batch: int, start_us: int, end_us: int) -> Span:
    return Span(lane, Stage("work", 2, sub_batch, 5), 7, 10**9 + start_us * 1000, 10**9 + end_us * 1000)


def drawn(live: LiveView) -> str:
    return engine_html(EngineView(EngineState.WORKING, sentence(live), live), [(0.0, 0.0), (20.0, 10.0)])


def text_of(html: str) -> str:
    return " ".join(re.sub("<[^>]*>", " ", html).split())


def test_all_figures_are_shown_with_their_units() -> None:
    spans = (
        span("device", 0, 0, 400),
        span("cpu", 1, 300, 800),
        span("device", NO_SUB_BATCH, 700, 1000),
    )
    view = make_view(chats(1, 2, held=1), spans=spans, iterations=(STEP,))
    html = drawn(view)
    text = text_of(html)
    assert "GPU-cache 6% 64 of 1,024 tokens · 32 of ended chats" in text
    assert "On the GPU 1 In main memory 2" in text
    assert "Chat 1: 100 tokens, waits for the CPU" in html
    assert "20.0 written, at most 20.0" in text
    # Overlap: 100 + 100 of 500 µs.
    assert "1 ms, the GPU was busy for 70%, the CPU attended for 50%, overlap 40%." in text
    assert "One iteration of 1 ms on 2 lanes" in html
    assert "GPU: work, layer 2, 0.3 ms" in text
    assert "GPU: work, layer 2, sub-batch 0, 0.4 ms" in text
    assert "predicted 6 ms, took 8 ms. Off by 25% on average over 1 iterations." in text
    assert "The limit" not in text  # nothing was measured, so nothing is claimed
    assert "… attention on the CPU 20 (40%)" in text
    assert html.count('class="both"') == 2


@asynccontextmanager
async def feeding(executor: FakeExecutor) -> AsyncIterator[tuple[EngineFeed, EngineService]]:
    service = EngineService(make_engine(executor))
    host = ModelHost(service)
    await host.start()
    try:
        yield EngineFeed(host), service
    finally:
        executor.open.set()
        await host.stop()


def test_a_busy_engine_is_not_waited_for_and_not_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "TIMEOUT_S", 0.05)
    monkeypatch.setattr(feeds, "PERIOD_S", 0.0)

    async def run() -> None:
        executor = FakeExecutor()
        async with feeding(executor) as (feed, service):
            assert (await feed.view()).state == "idle"
            executor.open.clear()
            async with await service.submit([[65, 66]], SamplingParams(max_tokens=4)):
                await asyncio.to_thread(executor.begun.wait, 20)
                views = [await feed.view() for _ in range(3)]
                assert len(service._asked) <= 1
                assert views[-1].live is not None  # the last view, with its age
                assert views[-1].live.stats.model == MODEL
                executor.open.set()

    asyncio.run(run())


WORKERS = {
    KVTier.worker(1): WorkerState("10.0.0.2:7455", None),
    KVTier.worker(2): WorkerState("10.0.0.3:7455", "it has not answered for 10 s"),
}


def test_the_page_tells_of_each_worker_and_of_why_one_is_lost() -> None:
    requests = [request(0, GPU), request(1, CPU), request(2, KVTier.worker(1)), request(3, KVTier.worker(1))]
    view = make_view(requests, workers=WORKERS)
    assert sentence(view).startswith(
        "4 chats at once: 1 on the GPU, 1 in main memory, where the CPU attends, 2 on workers, which attend."
    )
    assert notes(view) == [
        "worker-1 at 10.0.0.2:7455 attends for 2 chats; it has room for 1,024 tokens.",
        "worker-2 at 10.0.0.3:7455 is lost (it has not answered for 10 s): its chats are computed again "
        "elsewhere, and it is used again as soon as it answers.",
    ]
    text = text_of(drawn(view))
    assert "On the GPU 1 In main memory 1 On workers 2" in text
    assert "worker-1 (10.0.0.2:7455): 64 of 1,024 tokens" in text
    assert "worker-2 (10.0.0.3:7455): it has not answered for 10 s" in text
    alone = sentence(make_view(requests[2:3], workers=WORKERS))
    assert "1 chat: on workers, which attend." in alone
    assert "room for 1,024 tokens on the GPU and 1,024 in main memory" in sentence(make_view(workers=WORKERS))
