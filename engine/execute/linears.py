"""Linear stages of an iteration: whole, or cut at offloaded matmuls (HeteGen) or all-reduces (Megatron)."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial

from neo_desktop.engine.execute.expert_moves import ExpertMoves
from neo_desktop.engine.execute.lane import HostTask, Lane, Launcher, Signal, Step, device_step
from neo_desktop.engine.execute.offloaded_matmuls import OffloadedMatmuls, OffloadedPass
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.execute.weight_stream import WeightStream
from neo_desktop.models.operators import Store
from neo_desktop.models.ops import DividedExperts, Product
from neo_desktop.models.stages import Stages
from neo_desktop.models.state import State

Begin = Callable[[Launcher], Sequence[Signal]]
"""Submits what precedes a stage; returns the signals that the stage waits for."""


class Linears:
    """The linear stages of an iteration.

    Args:
        products: The model's offloaded matrices; None: it has none.
        used: Their matmuls in this iteration, in the device's order.
        are_capturable: True if graphs contain them.
        moves: Moves of experts beside the iteration; None: there are none.
    """

    def __init__(
        self,
        stages: Stages,
        products: OffloadedMatmuls | None,
        used: Sequence[OffloadedPass],
        *,
        are_capturable: bool,
        moves: ExpertMoves | None = None,
    ) -> None:
        self.stages = stages
        self.are_capturable = are_capturable
        # Ranks cut their stages at all-reduces, which no graph contains; that only pays with graphs.
        self.are_cut_at_sums = stages.is_part and self.are_capturable
        self._products, self._used = products, used
        self.moves = moves

    @property
    def key(self) -> int:
        """Distinguishes graphs of the stages for the same sizes of the iteration."""
        moves = None if self._products is None else self._products.moves
        if moves is None or not any(each.streams_experts for each in self._used):
            return 0
        return moves.version

    @property
    def streams(self) -> bool:
        """True if rows of weights are streamed to the device, through all layers."""
        return self._products is not None

    @cached_property
    def stream(self) -> WeightStream | None:
        """The stream of rows of offloaded matrices to the device; None: the model has none."""
        if self._products is None:
            return None
        indices = range(self.stages.config.num_layers + 1)
        return self._products.stream(p for i in indices for each in self._used for p in each.pieces(i))

    @property
    def tasks(self) -> list[HostTask]:
        """The CPU's copies of weights."""
        if self._products is None or self._products.staging is None:
            return []
        return [] if self.stream is None or self.stream.task is None else [self.stream.task]

    def steps(
        self,
        begin: Begin,
        stage: Stage,
        state: State,
        store: Callable[[], Store | None],
        products: OffloadedPass | None,
    ) -> Iterator[Step]:
        """Yield the steps of a stage, and the all-reduces between them; see `submit`."""
        if not self.are_cut_at_sums:

            def submit(launcher: Launcher) -> None:
                self.submit(launcher, stage, state, store(), products, begin(launcher))

            yield Step(submit)
            return
        yield Step(lambda launcher: launcher.wait(begin(launcher)))
        for step in self.stages.steps(stage.layer, state, store()):
            if step.work is not None:
                yield device_step(stage, step.work)
            if step.cut is not None:
                assert not isinstance(step.cut, Product | DividedExperts)  # ranks have no offloaded weights
                yield device_step(stage._replace(name="sum"), step.cut, is_capturable=False)

    def submit(
        self,
        launcher: Launcher,
        stage: Stage,
        state: State,
        store: Store | None,
        products: OffloadedPass | None,
        after: Sequence[Signal] = (),
    ) -> None:
        """Submit a stage.

        Args:
            stage: Its layer is the stage's index in `models.stages`.
            store: Target of k and v if the rotation kernel stores them.
            products: The stage's offloaded matmuls; None: no matrix is offloaded.
        """
        if products is None or self.stream is None:
            advance = partial(self.stages.advance, stage.layer, state, store)
            launcher.run(Lane.DEVICE, stage, advance, after)
            return
        if stage.layer == 0:
            self.stream.bring(launcher)
        steps = self.stages.steps(stage.layer, state, store)
        launcher.wait(products.advance(launcher, self.stream, stage, steps, after))
