"""Random iterations with async decodes."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from graph_case import TOKENS, decodes
from pipeline_case import NUM_LAYERS, RandomIterations, Request, sampling_input

from neo_desktop.engine.batch import (
    AsyncGroup,
    IterationPlan,
    IterationResult,
    SamplingInput,
    ScheduledSequence,
)
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier

MOST_SLOTS = 4


class AsyncIterations(RandomIterations):
    """Random iterations in which some CPU and worker decodes become async, and some async decodes restart.

    Args:
        num_layers: number of layers of the model.
        turns: share of iterations that are async steps.
        tiers: KV tiers of the requests.
    """

    def __init__(
        self,
        seed: int,
        num_blocks: int = 24,
        block_size: int = 8,
        num_layers: int = NUM_LAYERS,
        turns: float = 0.7,
        tiers: tuple[KVTier, ...] = MEASURED_TIERS,
    ) -> None:
        super().__init__(seed, num_blocks, tiers, block_size)
        self._turns = turns
        # Async decodes by stage, as of the last async step; decodes at the last stage have ended.
        self._async_groups: list[list[Request | None]] = [[] for _ in range(num_layers + 1)]
        self._ending: list[Request] = []
        self.num_ended = 0

    def _make_async_groups(self) -> tuple[AsyncGroup, ...]:
        self._ending = []
        if self._rng.random() > self._turns:
            return ()
        self._async_groups = [self._join_async(), *self._async_groups[:-1]]
        for group in self._async_groups:  # some decodes leave the pipeline, to restart later
            for slot, request in enumerate(group):
                if request is not None and (request not in self._requests or self._rng.random() < 0.03):
                    request.is_async = False
                    group[slot] = None
                    if request in self._requests:
                        self._states.take_back(request.name)
        slots = max(map(len, self._async_groups)) + self._rng.choice((0, 0, 1))
        self._ending = [request for request in self._async_groups[-1] if request is not None]
        return tuple(
            tuple(
                None if request is None else self._step(request, is_last=stage == len(self._async_groups) - 1)
                for request in [*group, *[None] * (slots - len(group))]
            )
            for stage, group in enumerate(self._async_groups)
        )

    def _join_async(self) -> list[Request | None]:
        group: list[Request | None] = [None] * self._rng.randint(1, MOST_SLOTS)
        for request in self._requests:
            rest = len(request.token_ids) - request.num_computed
            is_possible = request.tier.host_attends and not request.is_async and rest
            if not is_possible or self._rng.random() < 0.5:
                continue
            if None in group and self._take_blocks(request, request.num_computed + 1):
                free = [slot for slot, each in enumerate(group) if each is None]
                group[self._rng.choice(free)] = request
                request.is_async = True
                self._states.plan(request.name, request.num_computed, 1, is_last=True)
        return group

    def _step(self, request: Request, *, is_last: bool) -> ScheduledSequence:
        start = request.num_computed
        is_sampled = is_last and (start + 1 == len(request.token_ids) or self._rng.random() < 0.5)
        return ScheduledSequence(
            request.name,
            (request.token_ids[start],),
            start,
            request.tier,
            IntArray(request.blocks).view(),
            sampling_input(start + 1) if is_sampled else None,
            states=self._states.under_way(request.name),
        )

    def take_in(self, result: IterationResult) -> None:
        for request in self._ending:
            request.planned = request.num_computed, 1
            request.num_computed += 1
            request.is_async = False
            self.num_ended += 1
        super().take_in(result)


@dataclass
class Conveyor:
    """A steady state: in each async step one decode starts, if one is free, and all others advance a stage.

    Args:
        num_layers: number of layers of the model.
        names: requests that decode asynchronously, from `graph_case.HOMES`.
        beside: requests that decode in sub-batches meanwhile, a token in each async step.
        sampling: sampling settings for every request; None: greedy, with probabilities.
    """

    num_layers: int
    names: str = "cde"
    beside: tuple[str, ...] = ("ab",)
    sampling: SamplingInput | None = None
    num_turns: int = 0
    line: list[str | None] = field(default_factory=list)  # async decodes by stage
    steps: Counter[str] = field(default_factory=Counter)  # finished decodes per request

    def turns(self, count: int) -> Iterator[tuple[IterationPlan, dict[str, list[int]]]]:
        """Yield plans, each with the whole context of its sequences."""
        for _ in range(count):
            free = [name for name in self.names if name not in self.line[:-1]]
            before = self.line or [None] * (self.num_layers + 1)
            self.line = [min(free, key=lambda name: self.steps[name], default=None), *before[:-1]]
            async_groups = tuple(self._async_group(stage, name) for stage, name in enumerate(self.line))
            plan = replace(
                decodes(*self.beside, step=self.num_turns, sampling=self.sampling), async_decodes=async_groups
            )
            yield plan, {s.request_id: TOKENS[s.request_id][: s.context_len] for s in plan.all_sequences}
            self.num_turns += 1
            if (ended := self.line[-1]) is not None:
                self.steps[ended] += 1

    def _async_group(self, stage: int, name: str | None) -> AsyncGroup:
        slots: list[ScheduledSequence | None] = [None] * len(self.names)
        if name is not None:
            (one,) = decodes(name, step=self.steps[name], sampling=self.sampling).sequences
            is_last = stage == self.num_layers
            slots[self.names.index(name)] = one if is_last else one._replace(sampling=None)
        return tuple(slots)
