"""Partitions: the assignment of host decodes to sub-batches, candidates and their comparison."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from neo_desktop.engine.batch import MAX_ASYNC_DECODES
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.estimate import (
    BatchShape,
    Decodes,
    IterationShape,
    async_off_device,
    device_attention_ms,
    iteration_ms,
    joined,
    off_device_times,
)
from neo_desktop.engine.schedule.batch_builder import BatchBuilder

NOTHING = BatchShape()
# A candidate must be better by more than this to win: predictions have larger errors.
TOLERANCE = 0.01
MOST_MISSES = 8  # consecutive decodes that fit neither sub-batch: shorter ones are unlikely to follow


@dataclass(frozen=True, slots=True)
class Partition:
    """Positions in the host queue that an iteration takes, by sub-batch."""

    second: Sequence[int]  # in sub-batch 1
    first: Sequence[int]  # in sub-batch 0
    shape: IterationShape  # with as many async decodes as the iteration could advance
    predicted_ms: float
    num_chunks_second: int = 0  # the last chunks of prompts, which join sub-batch 1

    @property
    def num_taken(self) -> int:
        """Queue decodes in both sub-batches."""
        return len(self.second) + len(self.first)

    @property
    def num_async(self) -> int:
        return sum(requests for requests, _ in self.shape.async_decodes.values())


class CandidateGenerator:
    """Generates candidate partitions of an iteration; each method is one strategy."""

    def __init__(self, builder: BatchBuilder) -> None:
        self._builder, self._cost = builder, builder.cost
        self.shape, self.queue = builder.shape, builder.queue
        # The last token of a prompt alone is a decode in every tier.
        self._at_host = {tier: each for tier, each in self.shape.decodes.items() if tier.host_attends}
        self._attention_ms = device_attention_ms(self._cost, self.shape)

    def front(self, num_second: int, num_taken: int) -> Partition:
        """Return the front of the queue: `num_second` decodes for sub-batch 1, the rest for sub-batch 0."""
        return self._partition(range(num_second), range(num_second, num_taken))

    def together(self) -> Partition:
        """Return a single sub-batch with all decodes."""
        return self.front(0, len(self.queue))

    def halves(self) -> Partition:
        """Return two sub-batches of about equal context, with all prompts in the first (FastDecode)."""
        n, tokens = len(self.queue), self.queue.tokens
        half = tokens(0, n) / 2
        num_second = bisect_left(range(n + 1), half, key=lambda i: tokens(0, i))
        if num_second == n and not self.shape.tokens:
            num_second -= 1
        return self.front(max(num_second, 0), n)

    def hidden(self) -> Partition:
        """Return the decodes whose attention hides behind the device: NEO's step 4, see `fill`."""
        return self._partition(*self.fill())

    def fill(self) -> tuple[Sequence[int], Sequence[int]]:
        """Add decodes to a sub-batch while `T_ca1 <= T_l0` and `T_ca0 <= T_l1 + T_ga0` hold.

        Starved decodes join sub-batch 1 in any case.

        Returns:
            Positions in sub-batch 1, positions in sub-batch 0.
        """
        linear_ms, queue = self._cost.linear_ms, self.queue
        num_second = max(self._fitting(0, linear_ms(self.shape.tokens)), self._builder.num_starved)
        num_taken = num_second
        if not self._at_host:
            num_taken += self._fitting(num_second, linear_ms(num_second) + self._attention_ms)
        if num_taken == len(queue):
            return range(num_second), range(num_second, num_taken)
        second, first = list(range(num_second)), list(range(num_second, num_taken))
        in_second: Mapping[KVTier, Decodes] = queue.decodes(range(num_second))
        in_first: Mapping[KVTier, Decodes] = joined(
            self._at_host, queue.decodes(range(num_second, num_taken))
        )
        misses = 0
        for position in range(num_taken, len(queue)):  # a shorter decode may still fit
            tier, context_tokens = queue.contexts[position]
            one = {tier: Decodes(1, context_tokens)}
            longer = joined(in_second, one)
            if off_device_times(self._cost, longer).all <= linear_ms(self.shape.tokens + len(first)):
                second.append(position)
                in_second = longer
                continue
            longer = joined(in_first, one)
            if off_device_times(self._cost, longer).all <= linear_ms(len(second)) + self._attention_ms:
                first.append(position)
                in_first = longer
                continue
            misses += 1
            if misses == MOST_MISSES:
                break
        return second, first

    def candidates(self) -> Iterator[Partition]:
        """Yield plausible candidates, the simplest first."""
        n, tokens, linear_ms = len(self.queue), self.shape.tokens, self._cost.linear_ms
        if tokens:
            yield self.front(0, 0)
        if not n:
            return
        yield self.together()
        if tokens:
            beside_attention = self._fitting(0, self._attention_ms)
            if 0 < beside_attention < n:
                yield self.front(0, beside_attention)
            # NEO: sub-batch 1 hides behind the linear stages of sub-batch 0, then the other way round.
            second = self._fitting(0, linear_ms(tokens))
            if second:
                limit_ms = linear_ms(second) + self._attention_ms
                yield self.front(second, second + self._fitting(second, limit_ms))
        if n > 1:
            # Host-bound, all decodes: sub-batch 0 takes enough to hide the linear stages of sub-batch 1.
            limit_ms = linear_ms(n) + self._attention_ms
            first = min(self._fitting(0, limit_ms) + 1, n // 2) if tokens else n // 2
            yield self.front(n - first, n)
            if tokens:
                yield self.front(n, n)

    def with_prompts_in_both(self) -> Iterator[Partition]:
        """Yield partitions with about half of the prompt tokens in each sub-batch, and some decodes.

        Chunks stay whole: the chunks of one prompt must be in order within one sub-batch.
        """
        chunks, count = self._builder.chunks, len(self.queue)
        if count < 2 or len(chunks) < 2 or self._at_host:
            return
        half = (self.shape.tokens + count) / 2
        second, num_chunks = BatchShape(), 0
        while num_chunks < len(chunks) - 1:
            tokens, prefill_ms, rows = chunks[-1 - num_chunks]
            if tokens == 1 or second.tokens + tokens / 2 > half:
                break
            second = BatchShape(second.tokens + tokens, second.rows + rows, second.prefill_ms + prefill_ms)
            num_chunks += 1
        if not num_chunks:
            return
        shape = self.shape._replace(
            tokens=self.shape.tokens - second.tokens,
            rows=self.shape.rows - second.rows,
            prefill_ms=max(self.shape.prefill_ms - second.prefill_ms, 0.0),
        )
        cost, attention_ms = self._cost, device_attention_ms(self._cost, shape)
        for num_taken in sorted({count, 3 * count // 4, count // 2, count // 4} - {0, 1}, reverse=True):
            # The host attends for one sub-batch while the device computes the other.
            first_ms = cost.linear_ms(shape.tokens + num_taken // 2) + second.prefill_ms
            second_ms = cost.linear_ms(second.tokens + num_taken // 2) + attention_ms
            num_second = round(num_taken * first_ms / (first_ms + second_ms)) if first_ms else num_taken // 2
            yield self._predicted(range(num_second), range(num_second, num_taken), shape, second, num_chunks)

    def with_async(self, partition: Partition, *, workers_only: bool = False) -> Iterator[Partition]:
        """Yield the partition with as many async decodes as each tier has time for.

        Async decodes in flight may always advance, at any cost.

        Args:
            workers_only: start new async decodes on workers only.
        """
        cost, under_way = self._cost, self._builder.async_decodes
        if not (under_way or len(self.queue)) or not cost.overlaps or partition.num_chunks_second:
            return
        taken = {*partition.first, *partition.second}
        rest = self.queue.decodes([i for i in range(len(self.queue)) if i not in taken])
        rest = {
            tier: decodes
            for tier, decodes in rest.items()
            if tier.is_remote or (tier.host_attends and not workers_only)
        }
        possible = joined(under_way, rest)
        if not possible:
            return
        batches = partition.shape.batches
        times = [off_device_times(cost, batch.decodes) for batch in batches]
        layer_ms = partition.predicted_ms - cost.head_ms(sum(batch.rows for batch in batches))
        layer_ms /= cost.num_layers
        # All workers share the network; each tier has its own compute time.
        network_ms = layer_ms - sum(each.sending for each in times)
        cpu_ms = sum(cost.host_linear_ms(batch.tokens) for batch in batches)
        left = MAX_ASYNC_DECODES * cost.num_layers - sum(requests for requests, _ in under_way.values())
        counts = {tier: requests for tier, (requests, _) in under_way.items()}
        for tier, decodes in possible.items():
            begun = counts.get(tier, 0)
            idle_ms = layer_ms - (0.0 if tier.is_remote else cpu_ms)
            for batch in batches:
                if tier in batch.decodes:
                    here = off_device_times(cost, {tier: batch.decodes[tier]})
                    idle_ms -= here.cpu + here.away

            most = _share(decodes, min(decodes.requests, begun + left))
            count = max(self._fitting_beside(tier, most, idle_ms, network_ms), begun)
            if count:
                counts[tier] = count
                left -= count - begun
                network_ms -= async_off_device(cost, {tier: _share(decodes, count)}).sending

        def advancing(decodes: Mapping[KVTier, Decodes]) -> Partition:
            shape = partition.shape._replace(async_decodes=decodes)
            return Partition(partition.second, partition.first, shape, iteration_ms(cost, shape))

        most_decodes = {tier: _share(possible[tier], count) for tier, count in counts.items()}
        if sum(counts.values()) > sum(requests for requests, _ in under_way.values()):
            more = advancing(most_decodes)
            if (cost.num_layers + 1) * more.predicted_ms <= self._builder.limits.max_token_ms:
                yield more
                return
        if under_way:
            yield advancing({tier: _share(possible[tier], under_way[tier].requests) for tier in under_way})

    def _fitting_beside(self, tier: KVTier, decodes: Decodes, idle_ms: float, network_ms: float) -> int:
        """Return how many of these async decodes a tier can attend for within one layer.

        Args:
            idle_ms: idle time of the tier.
            network_ms: idle time of the network.
        """

        def is_too_much(count: int) -> bool:
            own = async_off_device(self._cost, {tier: _share(decodes, count)})
            return own.cpu + own.away > idle_ms or own.sending > network_ms

        return bisect_left(range(1, decodes.requests + 1), True, key=is_too_much)

    def _partition(self, second: Sequence[int], first: Sequence[int]) -> Partition:
        """Predict a partition; sub-batch 0 is never empty."""
        if second and not self.shape.tokens and not first:
            second, first = (), second
        return self._predicted(second, first, self.shape)

    def _predicted(
        self,
        second: Sequence[int],
        first: Sequence[int],
        shape: BatchShape,
        shape_second: BatchShape = NOTHING,
        num_chunks_second: int = 0,
    ) -> Partition:
        """Add decodes of the queue to these shapes of the sub-batches, and predict the iteration."""
        batches: tuple[BatchShape, ...] = (shape.plus(self.queue.decodes(first)),)
        if second or shape_second.tokens:
            batches = (*batches, shape_second.plus(self.queue.decodes(second)))
        whole = IterationShape(batches, self._builder.moved_tokens)
        return Partition(second, first, whole, iteration_ms(self._cost, whole), num_chunks_second)

    def _fitting(self, begin: int, limit_ms: float) -> int:
        """Return how many decodes from `begin` on the host can attend for within `limit_ms`."""
        queue, cost = self.queue, self._cost
        counts = range(1, len(queue) - begin + 1)
        return bisect_right(counts, limit_ms, key=lambda count: queue.host_ms(cost, begin, begin + count))


def _share(decodes: Decodes, count: int) -> Decodes:
    """Return `count` decodes with the mean context of these."""
    return Decodes(count, max(decodes.context_tokens * count // decodes.requests, 1))


@dataclass(frozen=True, slots=True)
class Objective:
    """Value of an iteration: `decode` per decode taken from the queue, plus `rest`.

    Candidates are compared by value per time.
    """

    decode: float
    rest: float  # value of the work that every candidate contains
    num_layers: int = 1

    def rate(self, partition: Partition) -> float:
        """Return the value per ms; an async decode counts for one layer's share."""
        worth = self.rest + (partition.num_taken + partition.num_async / self.num_layers) * self.decode
        return worth / partition.predicted_ms if partition.predicted_ms else float(partition.num_taken)

    def best(self, partitions: Iterable[Partition]) -> Partition:
        """Return the best partition; of partitions within `TOLERANCE`, the first.

        Raises:
            ValueError: `partitions` is empty.
        """
        best, best_rate = None, 0.0
        for partition in partitions:
            rate = self.rate(partition)
            if best is None or rate > best_rate * (1 + TOLERANCE):
                best, best_rate = partition, rate
        if best is None:
            raise ValueError("no partition to choose from")
        return best
