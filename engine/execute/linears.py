"""Linear stages of an iteration: whole, or cut at offloaded matmuls (HeteGen) or all-reduces (Megatron)."""

from collections.abc import Callable, Sequence
from functools import partial

from neo_desktop.engine.execute.host_work import HostWork
from neo_desktop.engine.execute.lane import Lane, Launcher, Signal
from neo_desktop.engine.execute.offloaded_matmuls import OffloadedMatmuls, OffloadedPass
from neo_desktop.engine.execute.part import PartBuilder
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.execute.weight_stream import WeightStream
from neo_desktop.models.operators import Store
from neo_desktop.models.stages import Stages
from neo_desktop.models.state import State

Begin = Callable[[Launcher], Sequence[Signal]]
"""Submits what precedes a stage; returns the signals that the stage waits for."""


class Linears:
    """The linear stages of an iteration.

    Args:
        products: The model's offloaded matrices; None: it has none.
        used: Their matmuls in this iteration, in the device's order.
        are_fixed: True if graphs contain the iteration's fixed parts.
    """

    def __init__(
        self,
        stages: Stages,
        products: OffloadedMatmuls | None,
        used: Sequence[OffloadedPass],
        *,
        are_fixed: bool,
    ) -> None:
        self.stages = stages
        self.are_fixed = are_fixed and stages.writes_in_place
        # Ranks cut their stages at all-reduces, which no graph contains; that only pays with graphs.
        self._is_cut_at_sums = stages.is_part and self.are_fixed
        # Streams rows of offloaded matrices to the device; None: the model has none.
        self.stream: WeightStream | None = None
        if products is not None:
            indices = range(stages.config.num_layers + 1)
            self.stream = products.stream(p for index in indices for each in used for p in each.pieces(index))

    @property
    def on_host(self) -> list[HostWork]:
        """The CPU's copies of weights."""
        return [] if self.stream is None or self.stream.staged is None else [self.stream.staged]

    def add(
        self,
        build: PartBuilder,
        begin: Begin,
        stage: Stage,
        state: State,
        store: Callable[[], Store | None],
        products: OffloadedPass | None,
        *,
        is_fixed: bool,
    ) -> None:
        """Add a stage to the iteration's parts; see `submit`."""
        if self._is_cut_at_sums:
            build.add(lambda launcher: launcher.wait(begin(launcher)), is_fixed=is_fixed)
            build.add_steps(stage, self.stages.steps(stage.layer, state, store()), is_fixed=is_fixed)
            return

        def submit(launcher: Launcher) -> None:
            self.submit(launcher, stage, state, store(), products, begin(launcher))

        build.add(submit, is_fixed=is_fixed)

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
            after: The signals that the stage waits for.
        """
        if products is None or self.stream is None:
            advance = partial(self.stages.advance, stage.layer, state, store)
            launcher.run(Lane.DEVICE, stage, advance, after)
            return
        if stage.layer == 0:
            self.stream.bring(launcher)
        steps = self.stages.steps(stage.layer, state, store)
        launcher.wait(products.advance(launcher, self.stream, stage, steps, after))
