"""The stages of an iteration: two sub-batches with overlapping GPU and CPU work (NEO, sections 3.1 and 3.3).

Time runs to the right; `i,l` is sub-batch i in layer l. Between the linear stages of two layers a sub-batch
needs its attention. The CPU attends for decodes with KV in host memory, while the device works for the other
sub-batch.

    device    |linear 0,l|attention 0,l|linear 1,l|attention 1,l|linear 0,l+1|attention 0,l+1|linear 1,l+1|..
    to-host              |qkv 0,l|                |qkv 1,l|                  |qkv 0,l+1|
    cpu                          |CPU attention 0,l |    |CPU attention 1,l          |CPU attention 0,l+1 |..
    to-device                                       |o 0,l|                          |o 1,l|
    swap      |copies of layer l+1, earlier KV of l+1|prompts' KV of l out|copies of layer l+2, ..

`linear i,l+1` waits for `o i,l`. It combines the second half of layer l and the first half of layer l+1. With
one sub-batch, its CPU attention runs beside its own device attention, and the linear stages wait for both.
Without KV in host memory and without copies, only `device` is used.

The device always attends for prompts. Prompts' KV for host memory is stored there layer by layer, behind the
computation of later layers. KV that precedes a chunk is fetched one layer ahead.

Dependencies, besides the chain linear → to-host → cpu → to-device → linear of a sub-batch:

- attention and stores in layer l wait for the copies of layer l. The copies run one layer ahead, in the
  plan's order, so a moved request's old block can have a new owner in the same iteration;
- attention of a chunk in layer l waits for the earlier KV of layer l;
- the fetch of layer l's earlier KV waits for the attention of layer l - 2, which reads the same buffer;
- the next layer's linear stages wait until k and v of prompts have left, because they reuse that memory.

Each sub-batch has one set of buffers for q, k, v and o, used by all layers. The chain orders all uses.

What attends or moves KV is an `Attender`: `decodes`, `prompts`, `async_decodes`, `streamed`, `moves`. Linear
stages, with or without the CPU's part, are in `linears`.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from neo_desktop.engine.execute.attender import Attender
from neo_desktop.engine.execute.lane import HostTask, Lane, Launcher, Signal, Step
from neo_desktop.engine.execute.layout import BatchMembers, GraphKey
from neo_desktop.engine.execute.linears import Linears
from neo_desktop.engine.execute.output_head import OutputHead
from neo_desktop.engine.execute.outputs import Outputs
from neo_desktop.engine.execute.sub_batch import SubBatchPass
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, Stage
from neo_desktop.engine.execute.workspace import BatchMemory, Workspace


class Program:
    """The stages of one iteration, or of every iteration that a graph serves.

    `fill` takes the inputs of an iteration.

    Args:
        shared: Copies of KV for both sub-batches.
    """

    outputs: Outputs  # of the last `fill`

    def __init__(
        self,
        workspace: Workspace,
        memory: BatchMemory,
        passes: Sequence[SubBatchPass],
        shared: Sequence[Attender],
        linears: Linears,
        ending: OutputHead,
    ) -> None:
        self._workspace = workspace
        self._memory = memory
        self._passes = tuple(passes)
        self._shared = tuple(shared)
        self._attenders = (*shared, *(attender for each in passes for attender in each.attenders))
        self._linears, self._ending = linears, ending
        self._num_layers = linears.stages.config.num_layers
        # Copies that flow through the layers allow one graph or none.
        flows = linears.streams or any(each.spans_layers for each in shared)
        self._is_capturable = linears.are_capturable and (ending.chooses or not flows)
        # True if work that no graph contains precedes each layer.
        self._fetches = any(each.fetches for each in self._attenders)

    @property
    def key(self) -> object:
        """Graph key: programs with equal keys have the same capturable steps."""
        keys = self._linears.key, *(each.key for each in self._attenders)
        return self.graph_key, self._fetches, self._ending.chooses, self._is_capturable, keys

    @property
    def is_whole(self) -> bool:
        """True if one graph can hold all layers and choose the tokens."""
        return self._ending.chooses

    @property
    def graph_key(self) -> GraphKey:
        return self._memory.graph_key

    @property
    def tasks(self) -> list[HostTask]:
        """The work of the CPU and of workers, each lane's in the device's order."""
        tasks = [task for each in self._shared for task in each.tasks]
        for each in self._passes:
            tasks += [] if each.products is None else each.products.tasks
            tasks += [task for attender in each.attenders for task in attender.tasks]
        return [*tasks, *self._ending.tasks, *self._linears.tasks]

    def fill(self, members: Sequence[BatchMembers], outputs: Outputs) -> None:
        """Take an iteration's sequences, by sub-batch, and its requested outputs."""
        self.outputs = self._ending.outputs = outputs
        for each, those in zip(self._passes, members, strict=True):
            for attender in each.attenders:
                attender.fill(those)

    def copied(self) -> tuple[float, float, int]:
        """Return the measured copies of streamed KV; see `Attender.copied`."""
        copy_ms, wait_ms, tokens = zip(*(each.copied() for each in self._shared), strict=True)
        return sum(copy_ms), sum(wait_ms), sum(tokens)

    def end(self) -> None:
        """Finish a successful iteration."""
        for each in self._attenders:
            each.commit()
        if self._linears.moves is not None:
            self._linears.moves.commit()

    def steps(self) -> Iterator[Step]:
        """Yield the iteration's steps in order."""
        yield Step(self._bring_inputs, is_capturable=False)
        moves = self._linears.moves
        if moves is not None:
            yield Step(moves.begin, is_capturable=False)
        if self._ending.chooses and not self._linears.are_cut_at_sums:
            # One step: a launched graph does not look at its layers.
            yield Step(self._submit_layers, self._is_capturable)
        else:
            yield from (
                Step(each.submit, each.is_capturable and self._is_capturable) for each in self._layers()
            )
        yield Step(self._ending.sample, is_capturable=False)
        if moves is not None:
            yield Step(moves.end, is_capturable=False)

    def _submit_layers(self, launcher: Launcher) -> None:
        for step in self._layers():
            step.submit(launcher)

    def _layers(self) -> Iterator[Step]:
        """Yield the steps of the layers and of the output head."""
        if self._fetches:
            yield Step(partial(self._fetch, 0), is_capturable=False)
        else:
            yield Step(self._fetch_all)
        for layer in range(self._num_layers):
            if self._fetches:
                yield Step(partial(self._begin_layer, layer), is_capturable=False)
            for each in self._passes:
                memory = each.memory
                stage = Stage("linear", layer, memory.index, memory.rows.count)
                begin, store = partial(self._begin, each, stage), partial(each.store, layer)
                yield from self._linears.steps(begin, stage, memory.state, store, each.products)
                for is_capturable, attenders in each.groups:
                    yield Step(partial(self._attend, attenders, layer), is_capturable)
            yield Step(partial(self._release, layer))
        yield Step(self._collect_last)
        yield from self._ending.steps(self._linears)

    def _bring_inputs(self, launcher: Launcher) -> None:
        memory = self._memory
        if memory.inputs is memory.staged:
            return

        def bring() -> None:
            memory.inputs.copy_(memory.staged, non_blocking=True)
            if not memory.is_fixed:  # its token table is its own
                latest = self._workspace.latest
                memory.table[: len(latest)].copy_(latest)

        launcher.run(Lane.DEVICE, Stage("inputs", 0, NO_SUB_BATCH, len(memory.inputs)), bring)

    def _fetch(self, layer: int, launcher: Launcher) -> None:
        for each in self._attenders:
            each.fetch(launcher, layer)

    def _fetch_all(self, launcher: Launcher) -> None:
        for each in self._attenders:
            each.fetch_all(launcher)

    def _begin_layer(self, layer: int, launcher: Launcher) -> None:
        if layer + 1 < self._num_layers:
            self._fetch(layer + 1, launcher)
        launcher.wait([signal for each in self._attenders for signal in each.fetched(layer)])

    def _begin(self, each: SubBatchPass, stage: Stage, launcher: Launcher) -> Sequence[Signal]:
        """Submit what precedes the linear stages of a layer; return the signals that they wait for."""
        if stage.layer == 0:
            launcher.run(Lane.DEVICE, stage._replace(name="embed"), each.start)
        return list(_collected(each.attenders, launcher, stage.layer - 1))

    def _attend(self, attenders: Sequence[Attender], layer: int, launcher: Launcher) -> None:
        linear = launcher.mark()
        launcher.wait([s for each in attenders for s in each.attend(launcher, layer, linear)])

    def _release(self, layer: int, launcher: Launcher) -> None:
        for each in self._shared:
            each.release(launcher, layer)

    def _collect_last(self, launcher: Launcher) -> None:
        for each in self._passes:
            launcher.wait(list(_collected(each.attenders, launcher, self._num_layers - 1)))


def _collected(attenders: Iterable[Attender], launcher: Launcher, layer: int) -> Iterator[Signal]:
    for each in attenders:
        yield from each.collect(launcher, layer)
