"""How fast any schedule can be: a closed bound from the same cost tables, without simulating anything.

Every token passes the linear stages; each decode reads its context once, on the GPU or on the CPU; an
iteration that decodes on the GPU reads all weights once and serves no more context than the GPU-cache holds.
With `x` the share of decode attention done on the CPU, `C` the context tokens of all decodes together and `N`
those that the GPU-cache holds, a run takes at least

    min over x of max( linear + prefill attention + (1 - x) * C * gpu,  x * C * cpu )
    where linear = max( tokens * cheapest linear per token,  (1 - x) * C / N * linear of one token )

with perfect overlap and no waiting, no hand-off, no moves. Where it is known that some tokens come one
after the other, the weights are read as often, whoever attends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from neo_desktop.engine.predict.cost_model import Curve, Surface, TableCostModel
from neo_desktop.engine.simulation.workload import WorkloadRequest

STEPS = 1000  # of x; the error is on the safe side, see `least_ms`


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be computed, whoever does it, in tokens."""

    linear_tokens: int  # through the linear stages
    outputs: int  # through the head
    prompt_context: float  # what prompts' tokens attend to, summed over these tokens
    longest_prompt: int
    decode_context: int  # what decodes attend to, summed over them
    longest_chain: int = 0  # decodes that come one after the other; 0: not known

    @classmethod
    def of(cls, requests: Sequence[WorkloadRequest]) -> Self:
        """Return the work of whole requests."""
        return cls(
            linear_tokens=sum(r.prompt_tokens + r.output_tokens - 1 for r in requests),
            outputs=sum(r.output_tokens for r in requests),
            # However a prompt is cut, its tokens see half of it on average.
            prompt_context=sum(r.prompt_tokens**2 / 2 for r in requests),
            longest_prompt=max((r.prompt_tokens for r in requests), default=1),
            decode_context=sum(_decode_context(r) for r in requests),
        )


def least_ms(
    cost: TableCostModel,
    work: Work,
    gpu_tokens: int,
    smallest_cpu_share: float = 0.0,
    largest_cpu_share: float = 1.0,
) -> float:
    """Return the least time that the work takes.

    Args:
        cost: the tables.
        gpu_tokens: what the GPU-cache holds.
        smallest_cpu_share: of decode attention: x above.
        largest_cpu_share: likewise; (0, 0) for gpu-only, (1, 1) for fastdecode.
    """
    linear = cost.num_layers * _least_per_unit(cost.linear)
    prefill = cost.num_layers * min(
        _least_per_first(cost.first_chunk_attention, work.longest_prompt),
        _least_per_later(cost.later_chunk_attention),
    )
    fixed_ms = work.outputs * _least_per_unit(cost.head) + prefill * work.prompt_context
    gpu, cpu = (
        cost.num_layers
        * min(
            _least_per_product(surface)
            for place, surface in cost.attention.items()
            if place.host_attends is host_attends
        )
        for host_attends in (False, True)
    )
    weights = cost.num_layers * cost.linear(1) + cost.iteration_ms

    def at_least(on_gpu: float, on_cpu: float) -> float:
        iterations = on_gpu * work.decode_context / gpu_tokens if gpu_tokens else 0.0
        iterations = max(iterations, work.longest_chain)
        linear_ms = max(work.linear_tokens * linear, iterations * weights)
        device_ms = fixed_ms + linear_ms + on_gpu * work.decode_context * gpu
        cpu_ms = on_cpu * work.decode_context * cpu
        return max(device_ms, cpu_ms) if cost.overlaps else device_ms + cpu_ms

    low, high = smallest_cpu_share, largest_cpu_share if gpu_tokens else 1.0
    width = (high - low) / STEPS
    # Over a step of x, what falls with x is taken at its end, what rises at its start: never too long.
    return min(at_least(1 - min(low + (step + 1) * width, high), low + step * width) for step in range(STEPS))


@dataclass(frozen=True, slots=True)
class Bound:
    """The bound for one workload on one machine.

    Args:
        cost: the tables.
        requests: arrival times are ignored: waiting only makes a run longer.
        gpu_tokens: what the GPU-cache holds.
    """

    cost: TableCostModel
    requests: Sequence[WorkloadRequest]
    gpu_tokens: int

    def makespan_ms(self, smallest_cpu_share: float = 0.0, largest_cpu_share: float = 1.0) -> float:
        """Return the least time; see `least_ms`."""
        work = Work.of(self.requests)
        return least_ms(self.cost, work, self.gpu_tokens, smallest_cpu_share, largest_cpu_share)

    def output_tokens_per_s(self, smallest_cpu_share: float = 0.0, largest_cpu_share: float = 1.0) -> float:
        """Return the most output tokens per second; see `makespan_ms`."""
        outputs = sum(request.output_tokens for request in self.requests)
        return outputs / self.makespan_ms(smallest_cpu_share, largest_cpu_share) * 1e3


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
