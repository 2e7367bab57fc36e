"""Which of the host's decodes join an iteration, and in which sub-batch: candidates, and the best of them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from neo_desktop.engine.predict.cost_model import CostModel
from neo_desktop.engine.predict.estimate import Load, costs_of, device_attention_ms, host_ms, iteration_ms
from neo_desktop.engine.schedule.draft import HostQueue

# A plan that is predicted to be this little better is not worth being different: predictions err by more.
TOLERANCE = 0.01
MOST_GUESSES = 6
MOST_MISSES = 8  # decodes in a row that fit neither sub-batch: nothing much shorter will come


@dataclass(frozen=True, slots=True)
class Split:
    """What an iteration takes from the queue, as positions in it."""

    second: Sequence[int]  # those in sub-batch 1
    first: Sequence[int]  # those in sub-batch 0
    loads: tuple[Load, ...]  # of the sub-batches
    predicted_ms: float

    @property
    def num_taken(self) -> int:
        """Decodes of the queue in both."""
        return len(self.second) + len(self.first)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What an iteration could hold; each of its methods is a way to divide that.

    Args:
        load: of sub-batch 0 without the queue.
        queue: decodes that the host attends for.
        swapped_tokens: see `iteration_ms`.
    """

    cost: CostModel
    load: Load
    queue: HostQueue
    swapped_tokens: int = 0

    def front(self, num_second: int, num_taken: int) -> Split:
        """The front of the queue: first those of sub-batch 1, then those of sub-batch 0."""
        load_0 = self.load.plus(self.queue.decodes(num_second, num_taken))
        load_1 = Load().plus(self.queue.decodes(0, num_second))
        return self._split(range(num_second), range(num_second, num_taken), load_0, load_1)

    def together(self) -> Split:
        """Everything in one."""
        return self.front(0, len(self.queue))

    def halves(self) -> Split:
        """All in two sub-batches of about equal context; prompts are in the first (FastDecode)."""
        n = len(self.queue)
        half = self.queue.tokens(0, n) / 2
        num_second = next((i for i in range(1, n + 1) if self.queue.tokens(0, i) >= half), 0)
        if num_second == n and not self.load.tokens:
            num_second -= 1
        return self.front(max(num_second, 0), n)

    def hidden(self, num_due: int = 0) -> Split:
        """Each joins a sub-batch while `T_ca1 <= T_l0` and `T_ca0 <= T_l1 + T_ga0` hold (NEO's step 4).

        Args:
            num_due: how many at the front join sub-batch 1 in any case.
        """
        cost, load_0 = self._costs(), self.load
        attention_ms = device_attention_ms(cost, load_0)
        num_second = max(self._fitting(cost, 0, cost.linear_ms(load_0.tokens)), num_due)
        load_1 = Load().plus(self.queue.decodes(0, num_second))
        first, second = list[int](), list(range(num_second))
        misses = 0
        for position in range(num_second, len(self.queue)):
            one = self.queue.decodes(position, position + 1)
            longer = load_1.plus(one)
            if host_ms(cost, longer) <= cost.linear_ms(load_0.tokens):
                second.append(position)
                load_1 = longer
                continue
            longer = load_0.plus(one)
            if host_ms(cost, longer) <= cost.linear_ms(load_1.tokens) + attention_ms:
                first.append(position)
                load_0 = longer
                continue
            misses += 1
            if misses == MOST_MISSES:
                break
        return self._split(second, first, load_0, load_1)

    def candidates(self) -> Iterator[Split]:
        """Yield all that is worth a thought, the simplest first."""
        n = len(self.queue)
        if self.load.tokens:
            yield self.front(0, 0)
        if not n:
            return
        yield self.together()
        cost = self._costs()
        if self.load.tokens:
            attention_ms = device_attention_ms(cost, self.load)
            beside_attention = self._fitting(cost, 0, attention_ms)
            if 0 < beside_attention < n:
                yield self.front(0, beside_attention)
            # NEO: sub-batch 1 hides behind the linear stages of sub-batch 0, then the other way round.
            second = self._fitting(cost, 0, cost.linear_ms(self.load.tokens))
            if second:
                limit_ms = cost.linear_ms(second) + attention_ms
                yield self.front(second, second + self._fitting(cost, second, limit_ms))
        if n > 1:
            # All of them, bound by the CPU: sub-batch 0 takes as many as hide the other's linear stages.
            limit_ms = cost.linear_ms(n) + device_attention_ms(cost, self.load)
            first = min(self._fitting(cost, 0, limit_ms) + 1, n // 2) if self.load.tokens else n // 2
            yield self.front(n - first, n)
            if self.load.tokens:
                yield self.front(n, n)

    def _split(self, second: Sequence[int], first: Sequence[int], load_0: Load, load_1: Load) -> Split:
        """Predict a split; sub-batch 0 is never empty."""
        if load_0.tokens and load_1.tokens:
            loads: tuple[Load, ...] = (load_0, load_1)
        else:
            second, first, loads = (), [*second, *first], (load_0 if load_0.tokens else load_1,)
        return Split(
            second, first, loads, iteration_ms(self.cost, *loads, swapped_tokens=self.swapped_tokens)
        )

    def _costs(self) -> CostModel:
        everybody = self.load.plus(self.queue.decodes(0, len(self.queue)))
        return costs_of(self.cost, everybody, swapped_tokens=self.swapped_tokens)

    def _fitting(self, cost: CostModel, begin: int, limit_ms: float) -> int:
        """Return how many decodes from `begin` on the host can do in that time."""
        queue = self.queue
        num_left = len(queue) - begin

        def takes_ms(count: int) -> float:
            return host_ms(cost, Load(decodes=queue.decodes(begin, begin + count)))

        if not num_left:
            return 0
        low, high = 1, num_left
        low_ms, high_ms = takes_ms(low), takes_ms(high)
        if low_ms > limit_ms:
            return 0
        if high_ms <= limit_ms:
            return high
        for _ in range(MOST_GUESSES):  # about linear in the count
            if high - low < 2:
                break
            guess = low + int((high - low) * (limit_ms - low_ms) / (high_ms - low_ms))
            guess = min(max(guess, low + 1), high - 1)
            ms = takes_ms(guess)
            if ms <= limit_ms:
                low, low_ms = guess, ms
            else:
                high, high_ms = guess, ms
        return low


@dataclass(frozen=True, slots=True)
class Worth:
    """What an iteration brings: a unit for each decode of the queue that it takes, and the rest.

    Worth over time is what candidates are compared by.
    """

    decode: float
    rest: float  # of what is in the iteration anyway

    def rate(self, split: Split) -> float:
        """Return the worth per ms."""
        worth = self.rest + split.num_taken * self.decode
        return worth / split.predicted_ms if split.predicted_ms else float(split.num_taken)

    def best(self, splits: Iterable[Split]) -> tuple[Split, float]:
        """Return the best one and its rate; of those that are about as good, the first.

        Raises:
            ValueError: there is none.
        """
        best: tuple[Split, float] | None = None
        for split in splits:
            rate = self.rate(split)
            if best is None or rate > best[1] * (1 + TOLERANCE):
                best = split, rate
        if best is None:
            raise ValueError("there is nothing to do")
        return best
