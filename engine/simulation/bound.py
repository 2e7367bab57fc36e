"""How fast any schedule can be: a closed bound from the same cost tables, without simulating anything.

Every token passes the linear stages; each decode reads its context once, on the GPU or on the CPU; an
iteration reads all weights at least once, serves no more context than GPU-cache and CPU-cache hold, and
brings each request no more than one token. With `x` the share of decode attention done on the CPU, `C` the
context tokens of all decodes together, `N` those that the GPU-cache holds and `M` the CPU-cache, a run takes
at least the least over x of

    max( linear + head + iterations * fixed + prefill attention + (1 - x) * C * gpu,  x * C * cpu )

    where iterations = max( (1 - x) * C / N,  x * C / M,  decodes / requests at a time,  longest output )
          linear     = max( tokens * cheapest linear per token,  iterations * linear of one token )
          head       = max( outputs * cheapest head per output,  iterations * head of one output )

with perfect overlap and no waiting, no hand-off, no moves. And it takes at least as long as any of its
requests would alone: what a single one needs comes one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Self

from neo_desktop.engine.predict.cost_model import Curve, Surface, TableCostModel
from neo_desktop.engine.simulation.workload import WorkloadRequest

STEPS = 1000  # of x; the error is on the safe side, see `least_ms`


@dataclass(frozen=True, slots=True)
class Room:
    """What there is room for at a time."""

    gpu_tokens: int  # in the GPU-cache
    cpu_tokens: int  # in the CPU-cache
    requests: float = inf  # that run


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be computed, by any device, in tokens."""

    linear_tokens: int  # through the linear stages
    outputs: int  # through the head
    prompt_context: float  # what prompts' tokens attend to, summed over these tokens
    longest_prompt: int
    decodes: int
    decode_context: int  # what they attend to, summed over them
    longest_chain: int  # iterations that come one after the other, since each brings one request a token

    @classmethod
    def of(cls, requests: Sequence[WorkloadRequest]) -> Self:
        """Return the work of whole requests."""
        return cls(
            linear_tokens=sum(r.prompt_tokens + r.output_tokens - 1 for r in requests),
            outputs=sum(r.output_tokens for r in requests),
            # However a prompt is cut, its tokens see half of it on average.
            prompt_context=sum(r.prompt_tokens**2 / 2 for r in requests),
            longest_prompt=max((r.prompt_tokens for r in requests), default=1),
            decodes=sum(r.output_tokens - 1 for r in requests),
            decode_context=sum(_decode_context(r) for r in requests),
            longest_chain=max((r.output_tokens for r in requests), default=0),
        )


class LeastTimes:
    """The least that the tables allow, per unit of work: what bounds are made of.

    Args:
        longest_prompt: in tokens.
    """

    def __init__(self, cost: TableCostModel, longest_prompt: int) -> None:
        layers = cost.num_layers
        self._overlaps = cost.overlaps
        self._token = layers * _least_per_unit(cost.linear)
        self._output = _least_per_unit(cost.head)
        self._reading, self._head, self._fixed = layers * cost.linear(1), cost.head(1), cost.iteration_ms
        self._prompt = layers * min(
            _least_per_first(cost.first_chunk_attention, longest_prompt),
            _least_per_later(cost.later_chunk_attention),
        )
        self._gpu, self._cpu = (
            layers
            * min(
                _least_per_product(surface)
                for tier, surface in cost.attention.items()
                if tier.host_attends is host_attends and not tier.is_remote
            )
            for host_attends in (False, True)
        )

    def ms(self, work: Work, room: Room, on_gpu: float, on_cpu: float, *, is_serial: bool = False) -> float:
        """Return the least time with these shares of decode attention on either side.

        Args:
            is_serial: whether nothing overlaps, since each step needs the one before.
        """
        gpu_context, cpu_context = on_gpu * work.decode_context, on_cpu * work.decode_context
        iterations = max(work.longest_chain, work.decodes / room.requests)
        if gpu_context:
            iterations = max(iterations, gpu_context / room.gpu_tokens)
        if cpu_context:
            iterations = max(iterations, cpu_context / room.cpu_tokens)
        linear_ms = max(work.linear_tokens * self._token, iterations * self._reading)
        head_ms = max(work.outputs * self._output, iterations * self._head)
        others_ms = iterations * self._fixed + work.prompt_context * self._prompt
        device_ms = linear_ms + head_ms + others_ms + gpu_context * self._gpu
        cpu_ms = cpu_context * self._cpu
        return max(device_ms, cpu_ms) if self._overlaps and not is_serial else device_ms + cpu_ms


def least_ms(
    cost: TableCostModel,
    work: Work,
    room: Room,
    smallest_cpu_share: float = 0.0,
    largest_cpu_share: float = 1.0,
) -> float:
    """Return the least time that the work takes.

    Args:
        cost: the tables.
        room: at least one cache has some.
        smallest_cpu_share: of decode attention: x above.
        largest_cpu_share: likewise; (0, 0) for gpu-only, (1, 1) for fastdecode.
    """
    least = LeastTimes(cost, work.longest_prompt)
    low, high = _shares(room, smallest_cpu_share, largest_cpu_share)
    width = (high - low) / STEPS
    # Over a step of x, what falls with x is taken at its end, what rises at its start: never too long.
    return min(
        least.ms(work, room, 1 - min(low + (step + 1) * width, high), low + step * width)
        for step in range(STEPS)
    )


@dataclass(frozen=True)
class Bound:
    """The bound for one workload on one machine.

    Args:
        cost: the tables.
        requests: arrival times are ignored: waiting only makes a run longer.
        room: at least one cache has some.
    """

    cost: TableCostModel
    requests: Sequence[WorkloadRequest]
    room: Room

    def makespan_ms(self, smallest_cpu_share: float = 0.0, largest_cpu_share: float = 1.0) -> float:
        """Return the least time; see `least_ms`."""
        shares = smallest_cpu_share, largest_cpu_share
        least = LeastTimes(self.cost, self._work.longest_prompt)
        alone_ms = (
            min(
                least.ms(work, self.room, 1 - share, share, is_serial=True)
                for share in _shares(self.room, *shares)
            )
            for work in (Work.of([request]) for request in self.requests)
        )
        return max(least_ms(self.cost, self._work, self.room, *shares), *alone_ms)

    def output_tokens_per_s(self, smallest_cpu_share: float = 0.0, largest_cpu_share: float = 1.0) -> float:
        """Return the most output tokens per second; see `makespan_ms`."""
        return self._work.outputs / self.makespan_ms(smallest_cpu_share, largest_cpu_share) * 1e3

    @cached_property
    def _work(self) -> Work:
        return Work.of(self.requests)


def _shares(room: Room, smallest: float, largest: float) -> tuple[float, float]:
    """Return between which shares the CPU's lies, where a cache may have no room."""
    return smallest if room.gpu_tokens else 1.0, largest if room.cpu_tokens else 0.0


def _decode_context(request: WorkloadRequest) -> int:
    """Return the context tokens of all its decodes: the prompt's iteration gives the first token."""
    decodes = request.output_tokens - 1
    return decodes * request.prompt_tokens + decodes * (decodes + 1) // 2


def _least_per_unit(curve: Curve) -> float:
    """Return the least of time / x anywhere: between two points it lies between theirs."""
    beyond = curve(2 * curve.x[-1]) - curve(curve.x[-1])
    return min([ms / x for x, ms in zip(curve.x, curve.ms, strict=True)] + [beyond / curve.x[-1]])


def _least_per_first(curve: Curve, longest: float) -> float:
    """Return the least of time / (x * x / 2), what x tokens see, up to the longest prompt.

    Between two points it exceeds one of theirs.
    """
    return min(2 * curve(x) / x**2 for x in (*curve.x, max(longest, curve.x[-1])))


def _least_per_later(surface: Surface) -> float:
    """Return the least of time / (x * (y - x / 2)), what x tokens see with a context of y at their end.

    Both are linear in y between two points of the grid, which therefore suffice. What is seen bends with x:
    points between are looked at, too.
    """
    steps = 4
    xs = [a + (b - a) * step / steps for a, b in pairwise(surface.x) for step in range(steps)]
    far = 1e3 * surface.y[-1]
    return min(
        surface(x, y) / (x * (y - x / 2))
        for x in (*xs, surface.x[-1])
        for y in (x, *(y for y in (*surface.y, far) if y > x))
    )


def _least_per_product(surface: Surface) -> float:
    """Return the least of time / (x * y) over the grid and far beyond it.

    Inside a cell a bilinear function is an average of its corners, and so is x * y with the same weights.
    """
    ratios = [
        ms / (x * y)
        for x, row in zip(surface.x, surface.ms, strict=True)
        for y, ms in zip(surface.y, row, strict=True)
    ]
    far = 1e3
    x, y = surface.x[-1], surface.y[-1]
    ratios += [surface(a, b) / (a * b) for a in (x, far * x) for b in (y, far * y)]
    return min(ratios)
