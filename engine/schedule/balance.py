"""Which CPU decodes join an iteration, and in which sub-batch: arithmetic on loads, nothing else.

CPU decodes come as a queue. A split takes some from its front for sub-batch 1, the next ones for sub-batch 0;
the rest waits for the next iteration.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from neo_desktop.engine.predict.cost_model import CostModel
from neo_desktop.engine.predict.estimate import Load, costs_of, cpu_ms, device_attention_ms, iteration_ms

# A plan that is predicted to be this little better is not worth being different: predictions err by more.
TOLERANCE = 0.01


@dataclass(frozen=True, slots=True)
class Split:
    """What an iteration takes from the queue of CPU decodes."""

    second: tuple[int, ...]  # positions in the queue of those in sub-batch 1
    first: tuple[int, ...]  # of those in sub-batch 0
    predicted_ms: float
    is_double: bool  # whether there are two sub-batches


class CpuQueue:
    """The CPU decodes that could be scheduled, those that waited longest first."""

    def __init__(self, context_tokens: Sequence[int]) -> None:
        self.context_tokens = context_tokens
        self._sums = list(accumulate(context_tokens, initial=0))

    def __len__(self) -> int:
        return len(self.context_tokens)

    def tokens(self, begin: int, end: int) -> int:
        """Context tokens of the decodes `begin .. end - 1`."""
        return self._sums[end] - self._sums[begin]

    def extended(self, context_tokens: int) -> "CpuQueue":
        """Return the queue with one more decode at its end."""
        return CpuQueue([*self.context_tokens, context_tokens])


@dataclass(frozen=True, slots=True)
class Balance:
    """Weighs splits against each other.

    The worth of an iteration is the time that its work would take on the device alone: a decode is worth
    `decode_ms`, what prompts are worth is `prefill_ms`. Worth over time is how much faster than the device
    alone an iteration is; the best iteration has the most of it. (NEO's step 6 compares requests over time;
    that cannot tell how much prefill is right.)
    """

    cost: CostModel
    decode_ms: float

    def best(
        self,
        load: Load,
        prefill_ms: float,
        queue: CpuQueue,
        swapped_tokens: int = 0,
        must_decode: bool = False,
    ) -> tuple[Split, float]:
        """Return the best split and its worth per time.

        Args:
            load: sub-batch 0 without CPU decodes.
            prefill_ms: worth of its prompts.
            queue: the CPU decodes.
            swapped_tokens: see `iteration_ms`.
            must_decode: whether some CPU decode must be in it.
        """
        best: tuple[Split, float] | None = None
        for begin, end in self._candidates(load, queue, swapped_tokens):
            if must_decode and not end:
                continue
            split = self._split(load, queue, begin, end, swapped_tokens)
            rate = self._rate(load, prefill_ms, split)
            if best is None or rate > best[1] * (1 + TOLERANCE):
                best = split, rate
        if best is None:
            raise ValueError("there is nothing to do")
        return best

    def _candidates(self, load: Load, queue: CpuQueue, swapped_tokens: int) -> Iterator[tuple[int, int]]:
        """Yield (decodes in sub-batch 1, decodes in both), the simplest first."""
        n = len(queue)
        cost = costs_of(self.cost, load.with_cpu_decodes(n, queue.tokens(0, n)), None, swapped_tokens)
        if load.tokens:
            yield 0, 0
        if not n:
            return
        yield 0, n
        if load.tokens:
            beside_attention = _fitting(cost, queue, 0, device_attention_ms(cost, load))
            if 0 < beside_attention < n:
                yield 0, beside_attention
            # NEO: sub-batch 1 hides behind the linear stages of sub-batch 0, then the other way round.
            second = _fitting(cost, queue, 0, cost.linear_ms(load.tokens))
            if second:
                limit_ms = cost.linear_ms(second) + device_attention_ms(cost, load)
                yield second, second + _fitting(cost, queue, second, limit_ms)
        if n > 1:
            # All of them, bound by the CPU: sub-batch 0 takes as many as hide the other's linear stages.
            limit_ms = cost.linear_ms(n) + device_attention_ms(cost, load)
            first = min(_fitting(cost, queue, 0, limit_ms) + 1, n // 2) if load.tokens else n // 2
            yield n - first, n
            if load.tokens:
                yield n, n

    def _split(self, load: Load, queue: CpuQueue, begin: int, end: int, swapped_tokens: int) -> Split:
        load_0 = load.with_cpu_decodes(end - begin, queue.tokens(begin, end))
        load_1 = Load().with_cpu_decodes(begin, queue.tokens(0, begin)) if begin else None
        if load_1 is not None and not load_0.tokens:
            load_0, load_1 = load_1, None
            return Split((), tuple(range(end)), iteration_ms(self.cost, load_0, None, swapped_tokens), False)
        predicted_ms = iteration_ms(self.cost, load_0, load_1, swapped_tokens)
        return Split(tuple(range(begin)), tuple(range(begin, end)), predicted_ms, load_1 is not None)

    def _rate(self, load: Load, prefill_ms: float, split: Split) -> float:
        num_decodes = load.gpu_requests + len(split.first) + len(split.second)
        worth_ms = num_decodes * self.decode_ms + prefill_ms
        return worth_ms / split.predicted_ms if split.predicted_ms else float(num_decodes)


def _fitting(cost: CostModel, queue: CpuQueue, begin: int, limit_ms: float) -> int:
    """Return how many decodes from `begin` on the CPU can do in that time."""
    num_left = len(queue) - begin

    def takes_ms(count: int) -> float:
        return cpu_ms(cost, Load(cpu_requests=count, cpu_context_tokens=queue.tokens(begin, begin + count)))

    if not num_left or takes_ms(1) > limit_ms:
        return 0
    whole_ms = takes_ms(num_left)
    if whole_ms <= limit_ms:
        return num_left
    # About linear in the count: a proportional guess, then a few steps down at most.
    count = max(int(num_left * limit_ms / whole_ms), 1)
    while count > 1 and takes_ms(count) > limit_ms:
        count = count * 7 // 8
    return count


def asymmetric(
    cost: CostModel, load: Load, queue: CpuQueue, is_due: Sequence[bool], swapped_tokens: int = 0
) -> Split:
    """Divide as NEO's step 4 does.

    A request joins a sub-batch while `T_ca1 <= T_l0` and `T_ca0 <= T_l1 + T_ga0` hold, and waits an iteration
    otherwise. One that is due joins in any case.
    """
    first: list[int] = []
    second: list[int] = []
    load_0, load_1 = load, Load()
    misses, n = 0, len(queue)
    stages = costs_of(cost, load.with_cpu_decodes(n, queue.tokens(0, n)), None, swapped_tokens)
    attention_ms = device_attention_ms(stages, load)
    for position, context_tokens in enumerate(queue.context_tokens):
        longer = load_1.with_cpu_decodes(1, context_tokens)
        if is_due[position] or cpu_ms(stages, longer) <= stages.linear_ms(load_0.tokens):
            second.append(position)
            load_1 = longer
            continue
        longer = load_0.with_cpu_decodes(1, context_tokens)
        if cpu_ms(stages, longer) <= stages.linear_ms(load_1.tokens) + attention_ms:
            first.append(position)
            load_0 = longer
        else:
            misses += 1
            if misses == 8 and not any(is_due[position:]):  # both are full; nothing much shorter will come
                break
    if not load_0.tokens:
        return Split((), tuple(second), iteration_ms(cost, load_1, None, swapped_tokens), False)
    is_double = bool(second)
    predicted_ms = iteration_ms(cost, load_0, load_1 if is_double else None, swapped_tokens)
    return Split(tuple(second), tuple(first), predicted_ms, is_double)


def symmetric(cost: CostModel, load: Load, queue: CpuQueue, swapped_tokens: int = 0) -> Split:
    """Divide all CPU decodes into two sub-batches of about equal context; prompts are in the first."""
    n = len(queue)
    half = queue.tokens(0, n) / 2
    num_second = next((i for i in range(1, n + 1) if queue.tokens(0, i) >= half), 0)
    if num_second == n and not load.tokens:
        num_second -= 1  # never an empty sub-batch
    load_0 = load.with_cpu_decodes(n - num_second, queue.tokens(num_second, n))
    load_1 = Load().with_cpu_decodes(num_second, queue.tokens(0, num_second)) if num_second > 0 else None
    return Split(
        second=tuple(range(num_second)),
        first=tuple(range(max(num_second, 0), n)),
        predicted_ms=iteration_ms(cost, load_0, load_1, swapped_tokens),
        is_double=load_1 is not None,
    )
