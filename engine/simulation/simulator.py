"""The scheduler on a virtual clock: decisions and KV accounting of the engine, without computation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from neo_desktop.engine.batch import IterationTiming
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.predict.estimate import attending_ms, copy_wait_ms, device_attention_ms
from neo_desktop.engine.request import FinishReason, RequestState
from neo_desktop.engine.schedule.batch_builder import SchedulerLimits
from neo_desktop.engine.schedule.iteration_builder import Decision
from neo_desktop.engine.schedule.policies import Policy
from neo_desktop.engine.schedule.scheduler import Scheduler
from neo_desktop.engine.simulation.drafts import SimulatedDrafts
from neo_desktop.engine.simulation.metrics import FinishedRequest, SimulationResult, Totals
from neo_desktop.engine.simulation.workload import WorkloadRequest

PROGRESS_EVERY = 256  # iterations


class SimulatedRequest(RequestState):
    """A request of known length without content, so that prefixes cannot be reused."""

    def __init__(self, ordinal: int, request: WorkloadRequest) -> None:
        name = str(ordinal)
        super().__init__(name, name, ordinal, request.prompt_tokens, request.total_tokens)
        self.arrival_ms = request.arrival_ms
        self.first_token_ms = 0.0


def simulate(
    requests: Sequence[WorkloadRequest],
    policy: Policy,
    cost: TableCostModel,
    num_blocks: Mapping[KVTier, int],
    block_size: int,
    limits: SchedulerLimits,
    *,
    max_context_tokens: int | None = None,
    num_states: int | None = None,
    true_timing: Callable[[Decision[SimulatedRequest]], IterationTiming] | None = None,
    seed: int = 0,
    acceptance: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> SimulationResult:
    """Run a workload to its end.

    Iterations take the time that the scheduler's cost model predicts, unless `true_timing` is given. Requests
    whose prompt and output exceed `max_context_tokens`, or the capacity of the policy's tiers, are refused on
    arrival and counted.

    Args:
        requests: in order of arrival.
        num_states: slots for states of recurrent layers; None: the model has no recurrent layers.
        true_timing: called with each decision; it may correct `cost`.
        seed: of the drafts.
        acceptance: probability that a drafted token is right; 0: no drafts.
        progress: called with the number of finished requests and the total.

    Raises:
        RuntimeError: the scheduler finds no work while requests wait, or loses blocks.
    """
    kv_cache = KVCache(num_blocks, block_size, num_states)
    scheduler: Scheduler[SimulatedRequest] = Scheduler(kv_cache, policy, limits, cost)
    drafts = SimulatedDrafts(acceptance, cost, limits.max_batch_requests, seed)
    queues = scheduler.queues
    longest = queues.max_context_tokens
    if max_context_tokens is not None:
        longest = min(longest, max_context_tokens)
    coming = [
        SimulatedRequest(ordinal, request)
        for ordinal, request in enumerate(requests)
        if request.total_tokens <= longest
    ]
    totals = Totals()
    finished: list[FinishedRequest] = []
    clock_ms = 0.0
    num_added = 0
    while len(finished) < len(coming):
        while num_added < len(coming) and coming[num_added].arrival_ms <= clock_ms:
            scheduler.add(coming[num_added])
            num_added += 1
        decision = scheduler.decide()
        if decision is None:
            if num_added == len(coming):
                raise RuntimeError(
                    f"policy {policy.name}: no work was scheduled, but "
                    f"{len(coming) - len(finished)} requests wait"
                )
            clock_ms = coming[num_added].arrival_ms
            continue
        decision, widths = drafts.widened(decision, queues, limits.max_batch_tokens)
        if true_timing is None:
            timing = replace(decision.predicted, copy_wait_ms=copy_wait_ms(cost, decision.shape))
        else:
            timing = true_timing(decision)
        clock_ms += timing.total_ms
        _count(totals, decision, timing, cost)
        for request in scheduler.advance(decision):
            drafts.accept(request, widths.get(request, 0))
            num_output_tokens = request.num_tokens - request.num_prompt_tokens
            if num_output_tokens == 1:
                request.first_token_ms = clock_ms
            if request.is_complete:
                request.finish_reason = FinishReason.LENGTH
                scheduler.remove(request)
                finished.append(
                    FinishedRequest(
                        request.arrival_ms,
                        request.first_token_ms,
                        clock_ms,
                        request.num_prompt_tokens,
                        num_output_tokens,
                    )
                )
        if progress is not None and totals.num_iterations % PROGRESS_EVERY == 0:
            progress(len(finished), len(coming))
    _check_empty(kv_cache)
    totals.num_preemptions = queues.counters.num_preemptions
    totals.num_moves = queues.counters.num_moves
    return SimulationResult(policy.name, finished, len(requests) - len(coming), longest, totals)


def _count(
    totals: Totals, decision: Decision[SimulatedRequest], timing: IterationTiming, cost: TableCostModel
) -> None:
    shape, batches = decision.shape, decision.shape.batches
    totals.num_iterations += 1
    totals.num_sequences += sum(map(len, decision.sub_batches))
    totals.num_pipelined += len(batches) == 2
    totals.iterating_ms += timing.total_ms
    totals.cpu_busy_ms += attending_ms(cost, shape)
    totals.copy_wait_ms += timing.copy_wait_ms
    products_ms = sum(cost.host_linear_ms(each.tokens) for each in batches)
    totals.cpu_busy_ms += cost.num_layers * products_ms
    layer_ms = sum(cost.linear_ms(each.tokens) + device_attention_ms(cost, each) for each in batches)
    totals.gpu_busy_ms += cost.num_layers * layer_ms + cost.head_ms(sum(each.rows for each in batches))


def _check_empty(kv_cache: KVCache) -> None:
    for tier, usage in kv_cache.usage().items():
        if usage.num_used_blocks:
            raise RuntimeError(f"{usage.num_used_blocks} blocks of the {tier.title} were never freed")
