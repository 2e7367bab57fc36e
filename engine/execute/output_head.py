"""The end of an iteration after the last layer: the needed hidden states, and tokens."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from neo_desktop.engine.cuda.copies import upload
from neo_desktop.engine.execute.lane import HostTask, Lane, Launcher, Step, device_step
from neo_desktop.engine.execute.linears import Linears
from neo_desktop.engine.execute.offloaded_matmuls import OffloadedMatmuls, OffloadedPass
from neo_desktop.engine.execute.outputs import Outputs
from neo_desktop.engine.execute.sub_batch import SubBatchPass
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, Stage
from neo_desktop.engine.execute.workspace import Workspace
from neo_desktop.models.stages import Stages
from neo_desktop.models.state import Scratch, State


class OutputHead:
    """The end of the last layer, either for all rows per sub-batch or for the needed rows of both together.

    Args:
        chooses: True if the last steps choose the most probable token of every row.
    """

    outputs: Outputs  # the requested outputs of the iteration

    def __init__(
        self,
        stages: Stages,
        workspace: Workspace,
        passes: Sequence[SubBatchPass],
        products: OffloadedMatmuls | None,
        *,
        chooses: bool,
    ) -> None:
        self._stages = stages
        self._config = stages.decoder.config
        self._workspace = workspace
        self._passes = passes
        self.chooses = chooses
        # Recurrent layers after the last attention need all rows.
        self._takes_all = chooses or stages.ends_with_states
        # The output head's offloaded matmuls, in the device's order.
        self.products = self._offloaded_passes(products)
        self._last_states: Tensor | None = None  # [rows, hidden], the needed rows

    @property
    def tasks(self) -> list[HostTask]:
        """The CPU's matmuls."""
        return [task for each in self.products for task in each.tasks]

    def steps(self, linears: Linears) -> Iterator[Step]:
        """Yield the steps after the last attention, up to the graph's tokens."""
        if not self.chooses:
            end_some = self._end_all if self._takes_all else self._end_needed
            yield Step(partial(end_some, linears), is_capturable=False)
            return
        rows = sum(each.memory.rows.count for each in self._passes)
        yield from self._all(linears, self._workspace.last_hidden[:rows])
        if self._stages.has_head:
            stage = Stage("most probable", self._config.num_layers, NO_SUB_BATCH, rows)
            yield device_step(stage, partial(self._choose, rows))

    def sample(self, launcher: Launcher) -> None:
        """Submit the sampler, if outputs are requested."""
        if self.outputs.count:
            stage = Stage("sample", self._config.num_layers, NO_SUB_BATCH, self.outputs.count)
            launcher.run(Lane.DEVICE, stage, partial(self.outputs.start, self._last_states))

    def _offloaded_passes(self, products: OffloadedMatmuls | None) -> list[OffloadedPass]:
        turns = range(self._config.num_layers, self._config.num_layers + 1)
        if products is None:
            return []
        if self._takes_all:
            return [products.of_rows(p.memory.index, p.memory.rows.count, turns) for p in self._passes]
        count = sum(len(each.last_rows) for each in self._passes)
        return [products.of_rows(0, count, turns)] if count else []

    def _all(self, linears: Linears, hidden: Tensor) -> Iterator[Step]:
        """Yield the steps that end the last layer for every row, into `hidden` [rows, hidden]."""
        outs = torch.split(hidden, [each.memory.rows.count for each in self._passes])
        for number, (each, out) in enumerate(zip(self._passes, outs, strict=True)):
            state = each.memory.state
            stage = Stage("linear", self._config.num_layers, each.memory.index, len(out))
            products = self._products_of(number)
            yield from linears.steps(lambda _: (), stage, state, lambda: None, products)
            yield device_step(stage, partial(self._stages.final_norm, state, out))

    def _products_of(self, number: int) -> OffloadedPass | None:
        return self.products[number] if self.products else None

    def _end_all(self, linears: Linears, launcher: Launcher) -> None:
        """Compute the last hidden state of every row, and keep the needed ones."""
        counts = [each.memory.rows.count for each in self._passes]
        hidden = self._passes[0].memory.state.residual.new_empty(sum(counts), self._config.hidden_size)
        for step in self._all(linears, hidden):
            step.submit(launcher)
        firsts = zip(accumulate(counts, initial=0), self._passes, strict=False)
        rows = [first + row for first, each in firsts for row in each.last_rows]
        if not rows:
            return
        self._last_states = hidden.new_empty(len(rows), self._config.hidden_size)
        index = upload(rows, torch.int64, hidden.device)
        stage = Stage("linear", self._config.num_layers, NO_SUB_BATCH, len(rows))
        launcher.run(Lane.DEVICE, stage, partial(torch.index_select, hidden, 0, index, out=self._last_states))

    def _end_needed(self, linears: Linears, launcher: Launcher) -> None:
        """Compute the needed last hidden states, with all sub-batches in order."""
        count = sum(len(each.last_rows) for each in self._passes)
        if not count:
            return
        self._last_states = self._passes[0].memory.state.residual.new_empty(count, self._config.hidden_size)
        wanted = [each for each in self._passes if each.last_rows]
        index = wanted[0].memory.index if len(wanted) == 1 else NO_SUB_BATCH
        stage = Stage("linear", self._config.num_layers, index, count)
        state = wanted[0].memory.state
        if len(wanted) > 1 or list(wanted[0].last_rows) != list(range(state.rows)):
            scratch = Scratch.empty(self._config, count, state.residual.dtype, state.residual.device)
            state = State.empty(self._config, count, state.residual.dtype, state.residual.device, scratch)
            launcher.run(Lane.DEVICE, stage, partial(self._select, wanted, state))
        linears.submit(launcher, stage, state, None, self._products_of(0))
        launcher.run(Lane.DEVICE, stage, partial(self._stages.final_norm, state, self._last_states))

    def _select(self, passes: Sequence[SubBatchPass], into: State) -> None:
        """Gather the last rows of several sub-batches, so that the weights are read only once."""
        device = into.residual.device
        last_rows = upload([row for each in passes for row in each.last_rows], torch.int64, device)
        first = 0
        for each, rows in zip(
            passes, torch.split(last_rows, [len(each.last_rows) for each in passes]), strict=True
        ):
            each.memory.state.select(rows, into, first)
            first += len(rows)

    def _choose(self, rows: int) -> None:
        """Choose tokens greedily; other sampling methods read the logits."""
        workspace = self._workspace
        logits = self._stages.logits(workspace.last_hidden[:rows], workspace.logits[:rows])
        self._stages.choose(logits, workspace.tokens[:rows])
