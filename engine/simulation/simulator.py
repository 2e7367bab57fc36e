"""The scheduler on a virtual clock: decisions and KV accounting of the engine, without computation."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from neo_desktop.engine.batch import IterationTiming
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.corrected import CorrectedCostModel
from neo_desktop.engine.predict.cost_model import Curve, TableCostModel
from neo_desktop.engine.predict.estimate import (
    IterationShape,
    attending_ms,
    copy_wait_ms,
    device_attention_ms,
    predict,
    streamed_tokens_of,
)
from neo_desktop.engine.request import FinishReason, RequestState
from neo_desktop.engine.schedule.batch_builder import SchedulerLimits
from neo_desktop.engine.schedule.iteration_builder import Decision
from neo_desktop.engine.schedule.policies import Policy
from neo_desktop.engine.schedule.scheduler import Scheduler
from neo_desktop.engine.simulation.drafts import SimulatedDrafts
from neo_desktop.engine.simulation.metrics import FinishedRequest, SimulationResult, Totals
from neo_desktop.engine.simulation.workload import WorkloadRequest

PROGRESS_EVERY = 256  # iterations


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Deviation of the true machine from the tables; the scheduler learns it only as the engine does."""

    gpu_slowdown: float = 1.0  # true time / table time of the GPU's stages
    cpu_slowdown: float = 1.0  # the same for CPU attention
    noise: float = 0.0  # relative deviation of single iterations (of a log-normal factor with median 1)
    bus_slowdown: float = 1.0  # the same for copies
    overlap_loss: float = 0.0  # time beyond the stages, per ms of attention outside the device
    launch_ms: float = 0.0  # the same, per layer of an iteration with prompts, moves or streamed KV

    def __post_init__(self) -> None:
        slowdowns = self.gpu_slowdown, self.cpu_slowdown, self.bus_slowdown
        if not (all(0 < slowdown < 100 for slowdown in slowdowns) and 0 <= self.noise < 1):
            raise ValueError("a slowdown must be between 0 and 100, noise at least 0 and below 1")
        if not (0 <= self.overlap_loss < 100 and 0 <= self.launch_ms < 100):
            raise ValueError("a loss must be at least 0 and below 100")


class Reality:
    """Gives iterations their true times and corrects the scheduler's cost model accordingly.

    Args:
        tables: the scheduler's initial cost model.
        seed: of the noise.
    """

    def __init__(self, tables: TableCostModel, mismatch: Mismatch, seed: int) -> None:
        self.believed = CorrectedCostModel.of(tables)  # for the scheduler
        transfer = Curve(tables.transfer.x, [ms * mismatch.bus_slowdown for ms in tables.transfer.ms])
        self.true = CorrectedCostModel.of(replace(tables, transfer=transfer))  # the actual machine
        true = self.true.correction
        true.device, true.host, true.bus = mismatch.gpu_slowdown, mismatch.cpu_slowdown, mismatch.bus_slowdown
        self._mismatch = mismatch
        self._random = random.Random(seed)

    def carry_out(self, predicted: IterationTiming, shape: IterationShape) -> float:
        """Return the true time of an iteration in ms, and correct the scheduler's cost model.

        Args:
            predicted: the scheduler's prediction.
            shape: of the iteration.
        """
        # The shape contains prefill times as the scheduler predicts them.
        factor = self.true.correction.device / self.believed.correction.device
        batches = tuple(each._replace(prefill_ms=each.prefill_ms * factor) for each in shape.batches)
        timing = predict(self.true, shape._replace(batches=batches))
        mismatch = self._mismatch
        noise = self._random.lognormvariate(0.0, mismatch.noise) if mismatch.noise else 1.0
        lost_ms = mismatch.overlap_loss * timing.host_attention_ms
        has_copies = shape.moved_tokens or any(sum(streamed_tokens_of(each)) for each in batches)
        if has_copies or any(each.tokens > each.num_decodes for each in batches):
            lost_ms += mismatch.launch_ms * self.true.num_layers
        total_ms = (timing.total_ms + lost_ms) * noise
        measured = replace(
            timing,
            total_ms=total_ms,
            host_attention_ms=timing.host_attention_ms * noise,
            copies_ms=timing.copies_ms * noise,
            copy_wait_ms=timing.copy_wait_ms * noise,
        )
        self.believed.learn(predicted, measured)  # as the engine does
        return total_ms


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
    mismatch: Mismatch | None = None,
    seed: int = 0,
    acceptance: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
    observe: Callable[[Decision[SimulatedRequest], TableCostModel], None] | None = None,
) -> SimulationResult:
    """Run a workload to its end.

    Iterations take the time that the scheduler's cost model predicts, unless a mismatch is given. Requests
    whose prompt and output exceed `max_context_tokens`, or the capacity of the policy's tiers, are refused on
    arrival and counted.

    Args:
        requests: in order of arrival.
        num_blocks: `tier -> blocks`.
        block_size: tokens per block.
        mismatch: deviation of the machine from the cost model.
        seed: of the mismatch's noise, and of the drafts.
        acceptance: probability that a drafted token is right; 0: no drafts.
        progress: called with the number of finished requests and the total.
        observe: called with each decision and the scheduler's cost model at that time.

    Raises:
        RuntimeError: the scheduler finds no work while requests wait, or loses blocks.
    """
    kv_cache = KVCache(num_blocks, block_size)
    reality = Reality(cost, mismatch, seed) if mismatch is not None else None
    if reality is not None:
        cost = reality.believed
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
        if observe is not None:
            observe(decision, cost)
        true_cost, iteration_ms = cost, decision.predicted.total_ms
        if reality is not None:
            true_cost = reality.true
            iteration_ms = reality.carry_out(decision.predicted, decision.shape)
        clock_ms += iteration_ms
        _count(totals, decision, cost, true_cost)
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
    totals: Totals, decision: Decision[SimulatedRequest], cost: TableCostModel, true_cost: TableCostModel
) -> None:
    shape, batches = decision.shape, decision.shape.batches
    totals.num_iterations += 1
    totals.num_sequences += sum(map(len, decision.sub_batches))
    totals.num_pipelined += len(batches) == 2
    totals.iterating_ms += decision.predicted.total_ms
    totals.cpu_busy_ms += attending_ms(cost, shape)
    totals.copy_wait_ms += copy_wait_ms(true_cost, shape)
    products_ms = sum(cost.host_linear_ms(each.tokens) for each in batches)
    totals.cpu_busy_ms += cost.num_layers * products_ms
    layer_ms = sum(cost.linear_ms(each.tokens) + device_attention_ms(cost, each) for each in batches)
    totals.gpu_busy_ms += cost.num_layers * layer_ms + cost.head_ms(sum(each.rows for each in batches))


def _check_empty(kv_cache: KVCache) -> None:
    for tier, usage in kv_cache.usage().items():
        if usage.num_used_blocks:
            raise RuntimeError(f"{usage.num_used_blocks} blocks of the {tier.title} were never freed")
