"""From requests to plans, and from results back to requests."""

from collections.abc import Iterable, Iterator

from neo_desktop.engine.batch import IterationPlan, IterationResult, ScheduledSequence, SubBatch
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.placement import Policy
from neo_desktop.engine.predict.cost_model import CostModel
from neo_desktop.engine.request import FinishReason, Request, RequestOutput
from neo_desktop.engine.schedule.load_aware import LoadAwareScheduler, SchedulerLimits

__all__ = ["Scheduler", "SchedulerLimits"]

MOST_SHRINKS = 32  # far more than halvings lead to a single token


class Scheduler(LoadAwareScheduler[Request]):
    """The load-aware scheduler in the form that the engine needs: plans out, results in."""

    def __init__(
        self,
        kv_cache: KVCache,
        policy: Policy,
        limits: SchedulerLimits,
        cost_model: CostModel | None = None,
    ) -> None:
        super().__init__(kv_cache, policy, limits, cost_model)
        self._requests: dict[str, Request] = {}
        self._num_shrinks = 0  # iterations in a row that the device had no memory for

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._requests[request.request_id] = request
        super().add(request)

    def remove(self, request: Request) -> None:
        """Forget a request and free its blocks."""
        del self._requests[request.request_id]
        super().remove(request)

    def schedule(self) -> IterationPlan | None:
        """Plan the next iteration; None when there is nothing to do."""
        decision = self.decide()
        if decision is None:
            return None
        return IterationPlan(
            tuple(SubBatch(tuple(self._sequences(batch))) for batch in decision.sub_batches),
            tuple(decision.copies),
            decision.predicted_ms,
            decision.predicted_cpu_ms,
        )

    def _sequences(self, batch: Iterable[tuple[Request, int]]) -> Iterator[ScheduledSequence]:
        """Yield a sub-batch in the one order for all readers: by place; there, prompts before decodes."""
        rank = {place: index for index, place in enumerate(self._policy.places)}
        for request, num_tokens in sorted(
            batch, key=lambda item: (rank[self._residency.place_of(item[0])], item[1] == 1)
        ):
            start = request.num_computed_tokens
            yield ScheduledSequence(
                request_id=request.request_id,
                token_ids=tuple(request.token_ids[start : start + num_tokens]),
                start=start,
                place=self._residency.place_of(request),
                block_table=self._kv.block_table(request.request_id),
                sampling=request.sampling_input() if start + num_tokens == request.num_tokens else None,
            )

    def update(self, plan: IterationPlan, result: IterationResult) -> list[RequestOutput]:
        """Take in what an iteration brought; return what each of its requests gained."""
        outputs = []
        for sequence in plan.sequences:
            request = self._requests.get(sequence.request_id)
            if request is None:  # aborted while the iteration ran
                continue
            if sequence.request_id in result.failed:
                outputs.append(self._finish(request, FinishReason.ERROR, result.failed[sequence.request_id]))
                continue
            request.num_computed_tokens = sequence.context_len
            self._kv.commit(
                request.request_id,
                request.block_hashes(self._kv.block_size),
                request.num_computed_tokens,
            )
            if sequence.sampling is not None:
                request.append(result.sampled[sequence.request_id])
                self.counters.num_output_tokens += 1
                if request.is_finished:
                    self.remove(request)
                outputs.append(request.take_output())
        self._grow_budget()
        self._num_shrinks = 0
        return outputs

    def abort(self, owner_id: str) -> list[RequestOutput]:
        """End all outputs of a request now and free their blocks; nothing happens if there are none left."""
        requests = [request for request in self._requests.values() if request.owner_id == owner_id]
        return [self._finish(request, FinishReason.ABORT) for request in requests]

    def fail(self, plan: IterationPlan, error: str) -> list[RequestOutput]:
        """End the requests of an iteration that could not be carried out."""
        requests = [self._requests[sequence.request_id] for sequence in plan.sequences]
        outputs = [self._finish(request, FinishReason.ERROR, error) for request in requests]
        self._residency.give_up_moved()
        return outputs

    def shrink(self, plan: IterationPlan) -> bool:
        """Book an iteration that the device had no memory for as not done: smaller ones follow.

        Returns:
            Whether there is something smaller to try.
        """
        num_tokens = sum(sub_batch.num_tokens for sub_batch in plan.sub_batches)
        self._num_shrinks += 1
        if (num_tokens == 1 and not plan.copies) or self._num_shrinks > MOST_SHRINKS:
            return False
        self._batch_tokens = max(num_tokens // 2, 1)
        self._residency.give_up_moved()
        return True

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> RequestOutput:
        request.finish(reason, error)
        self.remove(request)
        return request.take_output()
