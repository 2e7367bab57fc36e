"""The baseline of NEO's figures 9 and 10, SwiftLLM's default: an iteration is either prompts or decodes.

A waiting prompt runs first, as a whole, once it fits the GPU-cache. It serves only the comparison with the
paper: the project's own `gpu-only` runs prompts in chunks beside decodes, and is faster.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.predict.estimate import BatchShape, Decodes, IterationShape, iteration_ms
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.simulation.metrics import FinishedRequest, SimulationResult, Totals
from neo_desktop.engine.simulation.workload import WorkloadRequest


@dataclass(slots=True)
class _Running:
    request: WorkloadRequest
    first_token_ms: float
    num_outputs: int = 0

    @property
    def context(self) -> int:
        return self.request.prompt_tokens + self.num_outputs


def simulate_unmixed(
    requests: Sequence[WorkloadRequest], cost: TableCostModel, gpu_tokens: int, limits: SchedulerLimits
) -> SimulationResult:
    """Simulate requests that fit the GPU-cache one by one; a full cache preempts the youngest."""
    coming, waiting = deque(requests), deque[WorkloadRequest]()
    running: list[_Running] = []
    finished: list[FinishedRequest] = []
    totals = Totals()
    clock_ms = 0.0
    while coming or waiting or running:
        while coming and coming[0].arrival_ms <= clock_ms:
            waiting.append(coming.popleft())
        if not waiting and not running:
            clock_ms = coming[0].arrival_ms
            continue
        used = sum(item.context + 1 for item in running)
        prompts: list[WorkloadRequest] = []
        while waiting and len(running) + len(prompts) < limits.max_batch_requests:
            tokens = sum(prompt.prompt_tokens for prompt in prompts)
            new = waiting[0].prompt_tokens
            # The project's scheduler has the same reserve: a block of 16 tokens per request.
            if used + tokens + new + 16 * len(running) > gpu_tokens:
                break
            if prompts and tokens + new > limits.max_batch_tokens:
                break
            prompts.append(waiting.popleft())
        if prompts:
            load = BatchShape(
                tokens=sum(prompt.prompt_tokens for prompt in prompts),
                rows=len(prompts),
                prefill_ms=sum(cost.prefill_attention_ms(prompt.prompt_tokens, 0) for prompt in prompts),
            )
            clock_ms += iteration_ms(cost, IterationShape((load,)))
            batch = [_Running(prompt, clock_ms) for prompt in prompts]
            running += batch
        else:
            while sum(item.context + 1 for item in running) > gpu_tokens:
                waiting.appendleft(running.pop().request)
                totals.num_preemptions += 1
            contexts = sum(item.context for item in running)
            load = BatchShape().plus({KVTier.DEVICE: Decodes(len(running), contexts)})
            clock_ms += iteration_ms(cost, IterationShape((load,)))
            batch = running
        totals.num_iterations += 1
        totals.num_sequences += len(batch)
        for item in batch:
            item.num_outputs += 1
        for item in [item for item in batch if item.num_outputs == item.request.output_tokens]:
            request = item.request
            finished.append(
                FinishedRequest(
                    request.arrival_ms,
                    item.first_token_ms,
                    clock_ms,
                    request.prompt_tokens,
                    request.output_tokens,
                )
            )
        running = [item for item in running if item.num_outputs < item.request.output_tokens]
    return SimulationResult("prefill first", finished, 0, gpu_tokens, totals)
