"""The requests of the next iteration: the scheduler's steps 2 to 5."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic

from neo_desktop.engine.batch import MAX_ASYNC_DECODES, BlockCopy, DraftRow, IterationTiming
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.estimate import NO_DECODES, Decodes, IterationShape, joined, predict
from neo_desktop.engine.request import R, RequestState
from neo_desktop.engine.schedule.batch_builder import BatchBuilder, HostQueue
from neo_desktop.engine.schedule.partition import Partition
from neo_desktop.engine.schedule.policies import Policy
from neo_desktop.engine.schedule.request_queues import RequestQueues
from neo_desktop.engine.schedule.streamed import num_hidden

TIMEOUT = 128  # iterations that a host decode waits before it joins at any cost


@dataclass(frozen=True, slots=True)
class Decision(Generic[R]):
    """The content of one iteration, in terms of requests."""

    sub_batches: tuple[tuple[tuple[R, int], ...], ...]  # (request, tokens to compute)
    host_decodes: tuple[R, ...]  # scheduled decodes attended by the host
    waiting_decodes: tuple[R, ...]  # decodes without host or bus time, left for the next iteration
    copies: tuple[BlockCopy, ...]
    shape: IterationShape
    predicted: IterationTiming
    new_async: tuple[R, ...] = ()  # decodes that become async decodes
    is_async_step: bool = False  # async decodes advance by a layer
    drafts: Mapping[str, Sequence[DraftRow]] = field(default_factory=dict)  # request ID -> rows to verify


class IterationBuilder(Generic[R]):
    """Collects the requests of one iteration; starts with all decodes, which must have blocks.

    Args:
        new_builder: makes a builder of a batch with the given decodes, which the device attends for.
    """

    def __init__(
        self,
        queues: RequestQueues[R],
        policy: Policy,
        new_builder: Callable[[dict[KVTier, Decodes]], BatchBuilder],
        max_tokens: int,
    ) -> None:
        self._queues = queues
        self._policy = policy
        self._decodes: list[R] = []  # attended by the device
        self._unfinished: list[R] = []  # running requests with prompt tokens left
        self._chunks: list[tuple[R, int]] = []  # of prompts, running and new
        queue: list[tuple[KVTier, R]] = []
        streamed: list[R] = []
        at_device: dict[KVTier, Decodes] = {}
        for tier, running in queues.running.items():
            decodes = [r for r in running if r.num_tokens - r.num_computed_tokens == 1 and not r.is_complete]
            if len(decodes) < len(running):
                self._unfinished += [r for r in running if r.num_uncomputed_tokens > 1]
            if tier.host_attends:
                queue += [(tier, r) for r in decodes if r not in queues.async_groups]
            elif tier.is_streamed:
                streamed += decodes
            elif decodes:
                decodes = decodes[: max_tokens - len(self._decodes)]
                self._decodes += decodes
                at_device[tier] = Decodes(len(decodes), sum([request.num_tokens for request in decodes]))
        builder = self.builder = new_builder(at_device)
        builder.async_decodes = self._decodes_of(queues.async_groups)
        queue.sort(key=_iterations_waited, reverse=True)  # stable
        del queue[builder.budget :]
        self._queue = [request for _, request in queue]  # attended by the host, longest wait first
        builder.queue = HostQueue([(tier, request.num_tokens) for tier, request in queue])
        builder.num_starved = bisect_right(queue, -TIMEOUT, key=lambda item: -_iterations_waited(item))
        builder.budget -= len(queue)
        streamed.sort(key=lambda request: -request.iterations_waited)
        self._streamed = streamed[: builder.budget]  # candidates with streamed KV, longest wait first
        builder.budget -= len(self._streamed)

    @property
    def is_empty(self) -> bool:
        """True if no decode, and no chunk of a prompt, has joined or may join."""
        return not self.builder.shape.tokens and not self._queue

    def join_chunks(self, may_admit: bool, max_running: int) -> None:
        """Step 3: add chunks of running prompts, then of waiting ones."""
        queues, builder = self._queues, self.builder
        self._unfinished.sort(key=attrgetter("arrival"))
        may_admit = may_admit and bool(queues.waiting) and queues.may_have_room(queues.waiting[0])
        if not self._unfinished and not may_admit:
            return
        builder.budget, most_per_prompt = self._policy.prefill_budget(builder)
        for request in self._unfinished:
            self._join_chunk(request, most_per_prompt)
        while may_admit and builder.budget and queues.waiting:
            request = queues.waiting[0]
            if queues.num_running >= max_running or not self._admit(request):
                break
            self._join_chunk(request, most_per_prompt)

    def join_streamed(self) -> None:
        """Add the streamed decodes whose KV the bus can transfer while the device is busy.

        Starved requests come first, then requests in order of their last block. The streamed blocks are thus
        close together in memory, and few copies transfer them.
        """
        if not self._streamed:
            return
        queues, builder, streamed = self._queues, self.builder, self._streamed
        num_starved = bisect_right(streamed, -TIMEOUT, key=lambda request: -request.iterations_waited)
        last_block = {id(r): queues.kv.last_block(r.request_id) for r in streamed}
        streamed[num_starved:] = sorted(streamed[num_starved:], key=lambda r: last_block[id(r)])
        queue = HostQueue([(queues.tier_of(r), r.num_tokens) for r in streamed])
        num_joining = num_hidden(builder, queue, num_starved)
        more = queue.decodes(range(num_joining))
        if not num_starved and not self._policy.streams(builder, more):
            return
        builder.shape = builder.shape.plus(more)
        self._decodes += streamed[:num_joining]
        self._streamed = streamed[num_joining:]

    def decision(self) -> Decision[R]:
        """Let the policy assign the host's decodes to sub-batches; return the iteration."""
        builder, partition = self.builder, self._policy.partition(self.builder)
        first, second = ([self._queue[i] for i in part] for part in (partition.first, partition.second))
        taken = {*partition.first, *partition.second}
        rest = [request for i, request in enumerate(self._queue) if i not in taken]
        num_first_chunks = len(self._chunks) - partition.num_chunks_second
        chunks, second_chunks = self._chunks[:num_first_chunks], self._chunks[num_first_chunks:]
        sub_batches = [(*chunks, *[(r, 1) for r in self._decodes], *[(r, 1) for r in first])]
        if second or second_chunks:
            sub_batches.append((*second_chunks, *[(r, 1) for r in second]))
        # The last token of a prompt may need more than the next token, for example log-probabilities.
        may_begin = [request for request in rest if request.num_tokens > request.num_prompt_tokens]
        new_async = self._new_async(may_begin, partition)
        # A partition assumes the highest possible number of async decodes.
        async_decodes = NO_DECODES
        if partition.num_async:
            async_decodes = joined(builder.async_decodes, self._decodes_of(new_async))
        shape = partition.shape._replace(async_decodes=async_decodes)
        return Decision(
            tuple(sub_batches),
            (*second, *first),
            (*[request for request in rest if request not in new_async], *self._streamed),
            tuple(self._queues.copies),
            shape,
            predict(builder.cost, shape),
            tuple(new_async),
            bool(async_decodes),
        )

    def _join_chunk(self, request: R, most: int | None) -> None:
        num_tokens = min(request.num_uncomputed_tokens, self.builder.budget)
        if most is not None:
            num_tokens = min(num_tokens, most)
        if num_tokens:
            num_tokens = request.chunk_of(num_tokens)
            self._chunks.append((request, num_tokens))
            tier = self._queues.tier_of(request)
            self.builder.add_chunk(tier, num_tokens, request.num_computed_tokens, request.num_tokens)

    def _admit(self, request: R) -> bool:
        """Admit the longest-waiting request to the first tier that has room."""
        queues, builder = self._queues, self.builder
        builder.num_waiting = len(queues.waiting)
        builder.num_on_host = queues.num_on_host
        best = queues.tiers[0]
        if self._admit_to(best):
            return True
        if queues.waits_for_prompt:
            return False
        others = queues.less_preferred
        if request.num_tokens < queues.kv.capacity_tokens(best):  # it can wait
            state = request.arrival, queues.num_running, len(builder.queue), len(builder.chunks)
            if state == queues.refused:
                return False
            others = [tier for tier in others if self._policy.admits(builder, tier, request.num_tokens)]
            queues.refused = None if others else state
        return any(self._admit_to(tier) for tier in others)

    def _admit_to(self, tier: KVTier) -> bool:
        """Admit to this tier, unless another request is computing the prefix there or in an earlier tier."""
        queues = self._queues
        queues.waits_for_prompt = queues.waits_for_prompt or queues.is_mostly_coming(tier)
        return not queues.waits_for_prompt and queues.admit(tier)

    def _new_async(self, requests: Iterable[R], partition: Partition) -> list[R]:
        """Return the decodes that become async decodes, spread evenly over the layers."""
        under_way = self.builder.async_decodes
        room = {
            tier: count - under_way[tier].requests if tier in under_way else count
            for tier, (count, _) in partition.shape.async_decodes.items()
        }
        most = min(-(-partition.num_async // self._queues.async_groups.num_layers), MAX_ASYNC_DECODES)
        new_async: list[R] = []
        for request in requests:
            if len(new_async) >= most:
                break
            tier = self._queues.tier_of(request)
            if room.get(tier, 0) > 0:
                room[tier] -= 1
                new_async.append(request)
        return new_async

    def _decodes_of(self, requests: Iterable[R]) -> Mapping[KVTier, Decodes]:
        queue = HostQueue([(self._queues.tier_of(request), request.num_tokens) for request in requests])
        return queue.decodes(range(len(queue)))


def _iterations_waited(item: tuple[KVTier, RequestState]) -> int:
    return item[1].iterations_waited
