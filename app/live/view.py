"""From the engine's view of itself to what is sent."""

from collections.abc import Iterable

from neo_desktop.app.live import words
from neo_desktop.app.live.schema import (
    Batch,
    BoundView,
    Cache,
    Counters,
    EngineState,
    EngineView,
    LaneSpanView,
    LaneView,
    PredictionView,
    RatesView,
    RequestLine,
    Running,
    TimelineView,
    WeightsView,
    WorkerLine,
)
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, Span, busy_shares
from neo_desktop.engine.kv.cache import PoolUsage
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.live import LiveView
from neo_desktop.engine.remote.workers import WorkerState

LANES = ("device", "to-host", "cpu", "to-device", "swap")  # as they are drawn


def engine_view(view: LiveView, age_s: float = 0.0) -> EngineView:
    """Return what is sent of a view that is so old."""
    is_idle = not view.requests and view.stats.num_waiting == 0
    return EngineView(
        state=EngineState.IDLE if is_idle else EngineState.WORKING,
        sentence=words.sentence(view),
        notes=words.notes(view),
        age_s=round(age_s, 1),
        running=_running(view),
    )


def _running(view: LiveView) -> Running:
    stats = view.stats
    caches = {tier.label: _cache(pool, stats.block_size) for tier, pool in stats.pools.items()}
    return Running(
        model=stats.model,
        backend=stats.backend,
        policy=stats.policy,
        dtype=stats.dtype,
        device_name=view.device_name,
        is_gpu_imitated=view.is_gpu_imitated,
        gpu_sms=stats.gpu_sms,
        gpu_cache=caches.get("gpu"),
        cpu_cache=caches.get("cpu"),
        workers=[_worker(view, tier, state) for tier, state in view.workers.items()],
        requests=[
            RequestLine(
                number=request.arrival,
                tier=_word(request.tier),
                progress=request.phase,
                tokens=request.num_tokens,
                computed_tokens=request.num_computed_tokens,
                is_held=request.is_held,
            )
            for request in view.requests
        ],
        waiting=stats.num_waiting,
        gpu_alone_requests=view.num_gpu_alone,
        batch=_batch(view),
        rates=_rates(view),
        timeline=_timeline(view),
        prediction=_prediction(view),
        bound=_bound(view),
        weights=[
            WeightsView(
                memory="host" if view.device_name is None else "gpu",
                bytes=view.weights_bytes,
                dtype=stats.dtype,
            )
        ],
        counters=Counters(
            iterations=stats.num_iterations,
            double_iterations=stats.num_double_iterations,
            output_tokens=stats.num_output_tokens,
            cpu_decodes=stats.num_cpu_decodes,
            async_decodes=stats.num_async_decodes,
            prompt_tokens=stats.num_prompt_tokens,
            cached_tokens=stats.num_cached_tokens,
            moves=stats.num_moves,
            preemptions=stats.num_preemptions,
        ),
    )


def _worker(view: LiveView, tier: KVTier, state: WorkerState) -> WorkerLine:
    pool, block_size = view.stats.pools[tier], view.stats.block_size
    return WorkerLine(
        name=tier.name,
        address=state.address,
        total_tokens=pool.num_blocks * block_size,
        used_tokens=pool.num_used_blocks * block_size,
        lost=state.lost,
        losses=state.num_losses,
    )


def _word(tier: KVTier) -> str:
    """Return the page's word for a tier: one for all workers."""
    return "worker" if tier.is_remote else tier.label


def _cache(pool: PoolUsage, block_size: int) -> Cache:
    return Cache(
        total_tokens=pool.num_blocks * block_size,
        used_tokens=pool.num_used_blocks * block_size,
        leftover_tokens=pool.num_cached_blocks * block_size,
    )


def _batch(view: LiveView) -> Batch | None:
    if not view.iterations:
        return None
    last = view.iterations[-1]
    return Batch(
        requests=last.num_gpu_decodes + last.num_cpu_decodes + last.num_prompts,
        gpu_decodes=last.num_gpu_decodes,
        cpu_decodes=last.num_cpu_decodes,
        prompts=last.num_prompts,
        prompt_tokens=last.num_prompt_tokens,
        sub_batches=last.num_sub_batches,
        copied_blocks=last.num_copied_blocks,
    )


def _rates(view: LiveView) -> RatesView | None:
    rates = view.rates
    if rates is None:
        return None
    return RatesView(
        prompt_tokens_per_s=round(rates.prompt_tokens_per_s, 1),
        output_tokens_per_s=round(rates.output_tokens_per_s, 1),
        over_s=round(rates.over_s, 2),
    )


def _bound(view: LiveView) -> BoundView | None:
    limit = view.limit
    if limit is None:
        return None
    alone_ms = limit.gpu_alone_ms
    return BoundView(
        real_ms=round(limit.real_ms, 2),
        least_ms=round(limit.least_ms, 2),
        share=round(limit.share, 4),
        gpu_alone_ms=None if alone_ms is None else round(alone_ms, 2),
    )


def _timeline(view: LiveView) -> TimelineView | None:
    spans = view.spans
    if not spans:
        return None
    start_ns = min(span.start_ns for span in spans)
    busy, overlap = busy_shares(spans), view.overlap
    names = sorted(busy, key=lambda name: LANES.index(name) if name in LANES else len(LANES))
    return TimelineView(
        total_ms=_ms(max(span.end_ns for span in spans) - start_ns),
        age_s=round(view.spans_age_s, 1),
        overlap=None if overlap is None else round(overlap, 4),
        is_device_recorded="device" in busy,
        lanes=[
            LaneView(name=name, busy=round(busy[name], 4), spans=_lane(spans, name, start_ns))
            for name in names
        ],
    )


def _lane(spans: Iterable[Span], name: str, start_ns: int) -> list[LaneSpanView]:
    return [
        LaneSpanView(
            stage=span.stage.name,
            layer=span.stage.layer,
            sub_batch=None if span.stage.sub_batch == NO_SUB_BATCH else span.stage.sub_batch,
            start_ms=_ms(span.start_ns - start_ns),
            end_ms=_ms(span.end_ns - start_ns),
        )
        for span in spans
        if span.lane == name
    ]


def _prediction(view: LiveView) -> PredictionView | None:
    if view.mean_error is None:
        return None
    predicted = [one for one in view.iterations if one.predicted_ms > 0]
    return PredictionView(
        mean_error=round(view.mean_error, 4),
        predicted_ms=[round(one.predicted_ms, 3) for one in predicted],
        real_ms=[round(one.total_ms, 3) for one in predicted],
    )


def _ms(ns: int) -> float:
    return round(ns / 1e6, 4)
