"""Random iterations among which decodes go through the layers at their own pace."""

from pipeline_case import NUM_LAYERS, RandomIterations, Request, sampling_input

from neo_desktop.engine.batch import Cohort, IterationResult, ScheduledSequence
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.placement import Place

MOST_SLOTS = 4


class StaggeredIterations(RandomIterations):
    """Some requests of the host's decode one layer per turn; between turns comes anything, and they may go.

    Args:
        num_layers: of the model.
        turns: the share of iterations that are turns.
    """

    def __init__(
        self,
        seed: int,
        num_blocks: int = 24,
        block_size: int = 8,
        num_layers: int = NUM_LAYERS,
        turns: float = 0.7,
    ) -> None:
        super().__init__(seed, num_blocks, block_size=block_size)
        self._turns = turns
        # By stage, as of the last turn; who stands at the last one has ended.
        self._cohorts: list[list[Request | None]] = [[] for _ in range(num_layers + 1)]
        self._ending: list[Request] = []
        self.num_ended = 0

    def _make_cohorts(self) -> tuple[Cohort, ...]:
        self._ending = []
        if self._rng.random() > self._turns:
            return ()
        self._cohorts = [self._join_stagger(), *self._cohorts[:-1]]
        for cohort in self._cohorts:  # somebody gives up now and then, and begins again some time
            for slot, request in enumerate(cohort):
                if request is not None and (request not in self._requests or self._rng.random() < 0.03):
                    request.is_staggered = False
                    cohort[slot] = None
        slots = max(map(len, self._cohorts)) + self._rng.choice((0, 0, 1))
        self._ending = [request for request in self._cohorts[-1] if request is not None]
        return tuple(
            tuple(
                None if request is None else self._step(request, is_last=stage == len(self._cohorts) - 1)
                for request in [*cohort, *[None] * (slots - len(cohort))]
            )
            for stage, cohort in enumerate(self._cohorts)
        )

    def _join_stagger(self) -> list[Request | None]:
        cohort: list[Request | None] = [None] * self._rng.randint(1, MOST_SLOTS)
        for request in self._requests:
            rest = len(request.token_ids) - request.num_computed
            if request.place != Place.HOST or request.is_staggered or not rest or self._rng.random() < 0.5:
                continue
            if None in cohort and self._take_blocks(request, request.num_computed + 1):
                free = [slot for slot, each in enumerate(cohort) if each is None]
                cohort[self._rng.choice(free)] = request
                request.is_staggered = True
        return cohort

    def _step(self, request: Request, *, is_last: bool) -> ScheduledSequence:
        start = request.num_computed
        is_sampled = is_last and (start + 1 == len(request.token_ids) or self._rng.random() < 0.5)
        return ScheduledSequence(
            request.name,
            (request.token_ids[start],),
            start,
            request.place,
            IntArray(request.blocks).view(),
            sampling_input(start + 1) if is_sampled else None,
        )

    def take_in(self, result: IterationResult) -> None:
        for request in self._ending:
            request.num_computed += 1
            request.is_staggered = False
            self.num_ended += 1
        super().take_in(result)
