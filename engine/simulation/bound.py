"""An upper bound on throughput for any schedule: closed form, from the same cost tables, without simulation.

Every token passes the linear stages. Each decode reads its context once, on the GPU or on the CPU. An
iteration reads all weights at least once, serves no more context than GPU-cache and CPU-cache hold, and gives
each request at most one token. Let `x` be the share of decode attention on the CPU, `C` the decodes' total
context tokens, `N` the capacity of the GPU-cache and `M` that of the CPU-cache. A run takes at least
the minimum over x of

    max( linear + head + iterations * fixed + prefill attention + (1 - x) * C * gpu,  x * C * cpu )

    where iterations = max( (1 - x) * C / N,  x * C / M,  decodes / requests at a time,  longest output )
          linear     = max( tokens * cheapest linear per token,  iterations * linear of one token )
          head       = max( outputs * cheapest head per output,  iterations * head of one output )

with perfect overlap and no waiting, offload transfers or moves. It also takes at least as long as its longest
request alone, whose steps run one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Self

from neo_desktop.engine.predict.cost_model import Curve, Surface, TableCostModel
from neo_desktop.engine.simulation.workload import WorkloadRequest

STEPS = 1000  # values of x; `least_ms` rounds so that the bound stays valid


@dataclass(frozen=True, slots=True)
class Room:
    """Capacity at one time."""

    gpu_tokens: int  # of the GPU-cache
    cpu_tokens: int  # of the CPU-cache
    requests: float = inf  # running requests


@dataclass(frozen=True, slots=True)
class Work:
    """Work to compute on any device, in tokens."""

    linear_tokens: int  # through the linear stages
    outputs: int  # through the head
    prompt_context: float  # attended tokens, summed over prompt tokens
    longest_prompt: int
    decodes: int
    decode_context: int  # attended tokens, summed over decodes
    longest_chain: int  # iterations in sequence, because each gives a request one token

    @classmethod
    def of(cls, requests: Sequence[WorkloadRequest]) -> Self:
        return cls(
            linear_tokens=sum(r.prompt_tokens + r.output_tokens - 1 for r in requests),
            outputs=sum(r.output_tokens for r in requests),
            # In any chunking, a prompt token attends to half of the prompt on average.
            prompt_context=sum(r.prompt_tokens**2 / 2 for r in requests),
            longest_prompt=max((r.prompt_tokens for r in requests), default=1),
            decodes=sum(r.output_tokens - 1 for r in requests),
            decode_context=sum(_decode_context(r) for r in requests),
            longest_chain=max((r.output_tokens for r in requests), default=0),
        )


class LeastTimes:
    """Minimum times per unit of work in the tables, from which bounds are made."""

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
        """Return the minimum time with these shares of decode attention on GPU and CPU.

        Args:
            is_serial: nothing overlaps, because each step needs the previous one.
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
    """Return the minimum time of the work.

    Args:
        room: at least one cache is not empty.
        smallest_cpu_share: lower limit of x, see the module docstring.
        largest_cpu_share: upper limit of x; (0, 0) for gpu-only, (1, 1) for fastdecode.
    """
    least = LeastTimes(cost, work.longest_prompt)
    low, high = _shares(room, smallest_cpu_share, largest_cpu_share)
    width = (high - low) / STEPS
    # Within a step of x, take falling terms at its end and rising terms at its start: a valid lower bound.
    return min(
        least.ms(work, room, 1 - min(low + (step + 1) * width, high), low + step * width)
        for step in range(STEPS)
    )


@dataclass(frozen=True)
class Bound:
    """The bound for one workload on one machine.

    Args:
        requests: arrival times are ignored, because waiting only makes a run longer.
        room: at least one cache is not empty.
    """

    cost: TableCostModel
    requests: Sequence[WorkloadRequest]
    room: Room

    def makespan_ms(self, smallest_cpu_share: float = 0.0, largest_cpu_share: float = 1.0) -> float:
        """Return the minimum makespan; see `least_ms`."""
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
        """Return the maximum output tokens per second; see `makespan_ms`."""
        return self._work.outputs / self.makespan_ms(smallest_cpu_share, largest_cpu_share) * 1e3

    @cached_property
    def _work(self) -> Work:
        return Work.of(self.requests)


def _shares(room: Room, smallest: float, largest: float) -> tuple[float, float]:
    """Return the range of the CPU's share, narrowed if a cache is empty."""
    return smallest if room.gpu_tokens else 1.0, largest if room.cpu_tokens else 0.0


def _decode_context(request: WorkloadRequest) -> int:
    """Return the context tokens of a request's decodes; the prompt's iteration gives the first token."""
    decodes = request.output_tokens - 1
    return decodes * request.prompt_tokens + decodes * (decodes + 1) // 2


def _least_per_unit(curve: Curve) -> float:
    """Return the minimum of time / x: between two points it is between their values."""
    beyond = curve(2 * curve.x[-1]) - curve(curve.x[-1])
    return min([ms / x for x, ms in zip(curve.x, curve.ms, strict=True)] + [beyond / curve.x[-1]])


def _least_per_first(curve: Curve, longest: float) -> float:
    """Return the minimum of time / (x * x / 2), up to the longest prompt; x tokens attend to x * x / 2.

    Between two points the ratio is not below the smaller of theirs.
    """
    return min(2 * curve(x) / x**2 for x in (*curve.x, max(longest, curve.x[-1])))


def _least_per_later(surface: Surface) -> float:
    """Return the minimum of time / (x * (y - x / 2)): x tokens attend to that much, with a context of y.

    Both are linear in y between grid points, which therefore suffice. The attended tokens are curved in x, so
    intermediate values of x are checked as well.
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
    """Return the minimum of time / (x * y) over the grid and far beyond it.

    Inside a cell both a bilinear function and x * y are averages of their corners, with equal weights.
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
