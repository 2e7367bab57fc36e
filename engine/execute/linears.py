"""Linear stages of an iteration: whole, or cut at offloaded matmuls (HeteGen) or all-reduces (Megatron)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from neo_desktop.engine.execute.lane import Lane, Launcher, Signal
from neo_desktop.engine.execute.offloaded_matmuls import OffloadedPass
from neo_desktop.engine.execute.part import PartBuilder
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.execute.weight_stream import WeightStream
from neo_desktop.models.operators import Store
from neo_desktop.models.stages import Stages
from neo_desktop.models.state import State

Begin = Callable[[Launcher], Sequence[Signal]]
"""Submits what precedes a stage; returns the signals that the stage waits for."""


@dataclass(frozen=True)
class Linears:
    """The linear stages of an iteration.

    Args:
        stream: Streams rows of offloaded matrices to the device; None: no matrix is offloaded.
        is_cut_at_sums: True if parts end at all-reduces, which no graph contains.
    """

    stages: Stages
    stream: WeightStream | None
    is_cut_at_sums: bool

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
        if self.is_cut_at_sums:
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
