"""An iteration, written once: two sub-batches whose GPU and CPU work overlap (NEO, sections 3.1 and 3.3).

Time runs to the right; `i,l` is sub-batch i in layer l. Between the linear stages of two layers a sub-batch
needs its attention: that of decodes whose KV is in host memory is computed there, by the CPU, while the
device works for the other sub-batch.

    device    |linear 0,l|attention 0,l|linear 1,l|attention 1,l|linear 0,l+1|attention 0,l+1|linear 1,l+1|..
    to-host              |qkv 0,l|                |qkv 1,l|                  |qkv 0,l+1|
    cpu                          |CPU attention 0,l |    |CPU attention 1,l          |CPU attention 0,l+1 |..
    to-device                                       |o 0,l|                          |o 1,l|
    swap      |copies of layer l+1, earlier KV of l+1|prompts' KV of l out|copies of layer l+2, ..

`linear i,l+1` waits for `o i,l`: the second half of layer l and the first of layer l+1, as one stage. With
one sub-batch its CPU attention runs beside its own attention on the device, and the linear stages wait for
both. Without KV in host memory and without copies only `device` is used.

Prompts are always attended to on the device. Those whose KV lives in host memory have it stored there layer
by layer, behind the computation of later layers; what precedes such a chunk is fetched one layer ahead.

What waits for what, besides the chain linear → to-host → cpu → to-device → linear of a sub-batch:

- whatever attends or stores in layer l: the copies of layer l. They run one layer ahead, in the plan's
  order, so a block that a move gives up can be given to another request in the same iteration;
- attention of a chunk in layer l: the earlier KV of layer l;
- fetching the earlier KV of layer l: the attention of layer l - 2, which reads the same one of two buffers;
- the next layer's linear stages: that k and v of prompts have left, whose memory they take.

Each sub-batch has one set of buffers for q, k, v and o, used by all layers: the chain orders all its uses.

async decodes join the linear stages of sub-batch 0; nothing waits for their attention. See `async_decodes`.

KV that is swapped comes to the device a layer ahead, and what is new of it leaves: see `swapping`.

Of matrices that lie in host memory, too, the CPU has a part in the linear stages: see `offloaded_matmuls`.
"""

from collections.abc import Sequence
from functools import partial

import torch

from neo_desktop.engine.execute.host_work import HostWork
from neo_desktop.engine.execute.lane import Lane, Launcher, Signal
from neo_desktop.engine.execute.layout import GraphKey
from neo_desktop.engine.execute.output_head import OutputHead
from neo_desktop.engine.execute.outputs import Outputs
from neo_desktop.engine.execute.part import Part, PartBuilder
from neo_desktop.engine.execute.streamed import PrefetchStream
from neo_desktop.engine.execute.sub_batch import DeviceDecodes, OffloadedDecodes, SubBatchPass
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, Stage
from neo_desktop.engine.execute.transfers import HostTransfer, Moves
from neo_desktop.engine.execute.weight_stream import WeightStream
from neo_desktop.engine.execute.workspace import BatchMemory, Workspace
from neo_desktop.models.stages import Stages


class Program:
    """The stages of one iteration, made from a plan.

    Args:
        stages: the model's.
        workspace: what it works in.
        memory: the part of that.
        passes: its sub-batches.
        moves: the blocks that change their tier.
        outputs: what is asked of it.
        chooses: whether the most probable tokens are chosen within the last part, for all rows.
        window: brings swapped KV to the device; None: nobody attends to any.
    """

    def __init__(
        self,
        stages: Stages,
        workspace: Workspace,
        memory: BatchMemory,
        passes: Sequence[SubBatchPass],
        moves: Moves,
        outputs: Outputs,
        *,
        chooses: bool,
        window: PrefetchStream | None = None,
    ) -> None:
        self._stages = stages
        self._config = stages.decoder.config
        self._workspace = workspace
        self._memory = memory
        self._passes = tuple(passes)
        self._moves = moves
        self.outputs = outputs
        self._chooses = chooses
        self._window = window
        self._ending = OutputHead(stages, workspace, self._passes, outputs, chooses=chooses)
        self._stream = self._weight_stream()
        self._moved: dict[int, tuple[Signal, ...]] = {}  # by layer

    @property
    def key(self) -> object:
        """What programs have in common whose fixed parts are the same."""
        sets = tuple(each.async_decodes.old for each in self._passes if each.async_decodes is not None)
        return self.graph_key, self._has_cuts, self._chooses, self._window is not None, sets

    @property
    def graph_key(self) -> GraphKey:
        """Its sizes."""
        return self._memory.graph_key

    @property
    def is_fixed(self) -> bool:
        """Whether its fixed parts can be graphs."""
        return self._memory.is_fixed and self._stages.writes_in_place

    def _weight_stream(self) -> WeightStream | None:
        if self._workspace.split is None:
            return None
        splits = [each.split for each in self._passes if each.split is not None]
        pieces = [
            piece
            for turn in range(self._config.num_layers + 1)
            for each in (*splits, *self._ending.split)
            for piece in each.pieces(turn)
        ]
        return self._workspace.split.stream(pieces)

    @property
    def _has_fixed_layers(self) -> bool:
        """Whether layers are fixed: all or none, where pieces of weights or swapped KV flow through them."""
        return self._chooses or (self._stream is None and self._window is None)

    @property
    def _is_cut_at_sums(self) -> bool:
        """Whether linear stages end at each sum over ranks; without graphs nothing is won by that."""
        return self._stages.is_part and self.is_fixed

    @property
    def _has_cuts(self) -> bool:
        """Whether something has to happen before each layer that is not fixed."""
        return self._moves.has_any or any(
            prompts.fetches for each in self._passes for prompts in each.prompts
        )

    @property
    def transfers(self) -> list[HostTransfer]:
        """What the CPU brings to host memory and from there, in the order of each layer."""
        prompts = [prompts for each in self._passes for prompts in each.prompts]
        ahead = [transfer for each in prompts for transfer in each.transfers_ahead]
        return [*self._moves.transfers, *ahead, *(t for each in prompts for t in each.transfers_behind)]

    @property
    def on_host(self) -> list[HostWork]:
        """What the CPU multiplies, attends for and stages, in the order in which the device has it.

        That is by sub-batch; async decodes come behind the others of theirs.
        """
        found: list[HostWork] = []
        for each in self._passes:
            found += [] if each.split is None else each.split.on_host
            found += [offload.batch for offload in each.offloaded]
            found += [] if each.async_decodes is None else each.async_decodes.batches
        found += self._ending.on_host
        if self._stream is not None and self._stream.staged is not None:
            found.append(self._stream.staged)
        return found

    def copies(self) -> tuple[float, float, int]:
        """Return how copies of swapped KV went; see `PrefetchStream.measured`."""
        return (0.0, 0.0, 0) if self._window is None else self._window.measured()

    def end(self) -> None:
        """Take in that the iteration has ended well."""
        for each in self._passes:
            if each.async_decodes is not None:
                each.async_decodes.memory.end_turn()
            for decodes in each.decodes:
                if decodes.new_rows is not None:
                    decodes.new_rows.store()

    def parts(self) -> list[Part]:
        """Return all stages, in order."""
        build = PartBuilder()
        build.add(self._bring_inputs, is_fixed=False)
        if self._has_cuts:
            build.add(partial(self._bring_kv, 0), is_fixed=False)
        elif self._window is not None:
            build.add(self._window.allow_all, is_fixed=self._has_fixed_layers)
        for layer in range(self._config.num_layers):
            if self._has_cuts:
                build.add(partial(self._begin_layer, layer), is_fixed=False)
            for each in self._passes:
                self._add_step(build, each, layer)
                if each.prompts:
                    build.add(partial(self._attend_to_prompts, each, layer), is_fixed=False)
            if self._window is not None:
                build.add(partial(self._end_layer, self._window, layer), is_fixed=self._has_fixed_layers)
        build.add(self._collect_last, is_fixed=self._has_fixed_layers)
        self._ending.add(build, self._stream, is_cut_at_sums=self._is_cut_at_sums)
        return build.parts

    def _bring_inputs(self, launcher: Launcher) -> None:
        memory = self._memory
        if memory.inputs is memory.staged:
            return

        def bring() -> None:
            memory.inputs.copy_(memory.staged, non_blocking=True)
            if not memory.is_fixed:  # it has a table of its own
                latest = self._workspace.latest
                memory.table[: len(latest)].copy_(latest)

        launcher.run(Lane.DEVICE, Stage("inputs", 0, NO_SUB_BATCH, len(memory.inputs)), bring)

    def _bring_kv(self, layer: int, launcher: Launcher) -> None:
        """Start to bring what layer `layer` needs to where it is needed."""
        self._moved[layer] = self._moves.submit(launcher, layer)
        if self._window is not None:
            self._window.allow(launcher, layer, self._moved[layer])
        for each in self._passes:
            for prompts in each.prompts:
                prompts.fetch(launcher, layer)

    def _begin_layer(self, layer: int, launcher: Launcher) -> None:
        if layer + 1 < self._config.num_layers:
            self._bring_kv(layer + 1, launcher)
        launcher.wait(self._moved[layer])

    def _end_layer(self, window: PrefetchStream, layer: int, launcher: Launcher) -> None:
        window.used(launcher, layer)

    def _add_step(self, build: PartBuilder, each: SubBatchPass, layer: int) -> None:
        """Go from the attention of the layer before to that of this one; prompts' follows.

        Sums over ranks are never fixed: graphs stand before and after them.
        """
        is_fixed = self._has_fixed_layers
        if self._is_cut_at_sums:
            build.add(partial(self._begin_step, each, layer), is_fixed=is_fixed)
            steps = self._stages.steps(
                layer - 1 if layer else None, layer, each.memory.state, each.store(layer)
            )
            stage = Stage("linear", layer, each.memory.index, each.memory.rows.count)
            build.add_steps(stage, steps, is_fixed=is_fixed)
        else:
            build.add(partial(self._advance, each, layer), is_fixed=is_fixed)
        if each.decodes or each.offloaded or each.async_decodes is not None:
            build.add(partial(self._attend_to_decodes, each, layer), is_fixed=is_fixed)

    def _begin_step(self, each: SubBatchPass, layer: int, launcher: Launcher) -> None:
        launcher.wait(self._collect(each, layer - 1, launcher))
        if layer == 0:
            stage = Stage("linear", 0, each.memory.index, each.memory.rows.count)
            launcher.run(Lane.DEVICE, stage, partial(self._embed, each))

    def _attend_to_decodes(self, each: SubBatchPass, layer: int, launcher: Launcher) -> None:
        """Give the CPU and workers what they attend to, and attend to the rest on the device meanwhile."""
        memory, linear = each.memory, launcher.mark()
        for offload in each.offloaded:
            count = len(offload.batch.offload_buffers.qkv)
            stage = Stage("q, k, v", layer, memory.index, count)
            sent = launcher.run(Lane.TO_HOST, stage, partial(self._send, each, offload), (linear,))
            batch = offload.batch
            offload.attended = launcher.host(batch.lane, batch.stage(layer), batch.step(layer), (sent,))
        exchanged = () if each.async_decodes is None else each.async_decodes.exchange(launcher, layer, linear)
        for decodes in each.decodes:
            stage = Stage("attention", layer, memory.index, len(decodes.context_lens))
            if decodes.new_rows is not None and self._window is not None:
                self._window.wait(launcher, layer)
            attended = launcher.run(Lane.DEVICE, stage, partial(self._attend, each, decodes, layer))
            if decodes.new_rows is not None:
                decodes.new_rows.send(launcher, layer, attended)
        launcher.wait(exchanged)

    def _advance(self, each: SubBatchPass, layer: int, launcher: Launcher) -> None:
        """Give the linear stages to the lanes."""
        memory, finished = each.memory, layer - 1 if layer else None
        stage = Stage("linear", layer, memory.index, memory.rows.count)
        after = self._collect(each, layer - 1, launcher)
        if each.split is None or self._stream is None:
            launcher.run(Lane.DEVICE, stage, partial(self._linear, each, layer), after)
            return
        if layer == 0:
            self._stream.bring(launcher)
            launcher.run(Lane.DEVICE, stage, partial(self._embed, each))
        steps = self._stages.steps(finished, layer, memory.state, each.store(layer))
        each.split.advance(launcher, self._stream, stage, steps, after)

    def _collect(self, each: SubBatchPass, layer: int, launcher: Launcher) -> list[Signal]:
        """Bring what the CPU attended to in a layer back; return what ends then."""
        arrived = []
        for offload in each.offloaded:
            if offload.attended is not None:
                out, rows = offload.batch.offload_buffers.out, each.memory.state.attention[offload.rows]
                stage = Stage("o", layer, each.memory.index, len(out))
                bring = partial(rows.copy_, out, non_blocking=True)
                arrived.append(launcher.run(Lane.TO_DEVICE, stage, bring, (offload.attended,)))
                offload.attended = None
        return arrived

    def _attend_to_prompts(self, each: SubBatchPass, layer: int, launcher: Launcher) -> None:
        q, _, _ = self._stages.heads(each.memory.state)
        kv = self._stages.keys_values(each.memory.state)
        for prompts in each.prompts:
            launcher.wait(prompts.store(launcher, layer, kv))
        config, memory = self._config, each.memory
        out, window = memory.state.attention, config.layer_windows[layer]
        sinks = self._stages.decoder.layers[layer].sinks

        def attend() -> None:
            for prompts in each.prompts:
                prompts.attend(
                    layer, q, kv, out, config.attention_scale, window, sinks, config.attention_softcap
                )

        launcher.run(Lane.DEVICE, Stage("attention", layer, memory.index, memory.rows.prompts), attend)
        for prompts in each.prompts:
            prompts.attended(launcher)

    def _collect_last(self, launcher: Launcher) -> None:
        for each in self._passes:
            launcher.wait(self._collect(each, self._config.num_layers - 1, launcher))

    # What the lanes run.

    def _embed(self, each: SubBatchPass) -> None:
        memory = each.memory
        if memory.table is not None:
            torch.index_select(memory.table, 0, memory.inputs.sources, out=memory.token_ids)
        self._stages.embed(memory.token_ids, memory.inputs.positions, memory.state)

    def _linear(self, each: SubBatchPass, layer: int) -> None:
        if layer == 0:
            self._embed(each)
        self._stages.advance(layer - 1 if layer else None, layer, each.memory.state, each.store(layer))

    def _send(self, each: SubBatchPass, offload: OffloadedDecodes) -> None:
        target = offload.batch.offload_buffers.qkv
        rows = each.memory.state.qkv[offload.rows]
        target.copy_(rows.view(target.shape), non_blocking=True)

    def _attend(self, each: SubBatchPass, decodes: DeviceDecodes, layer: int) -> None:
        config, state, rows = self._config, each.memory.state, decodes.rows
        q, k, v = self._stages.heads(state)
        fused_kv_append = decodes.pool.fused_kv_append
        decodes.pool.layer(layer).decode(
            q[rows],
            None if fused_kv_append else k[rows],
            None if fused_kv_append else v[rows],
            decodes.slots,
            decodes.block_tables,
            decodes.context_lens,
            state.attention[rows],
            config.attention_scale,
            config.layer_windows[layer],
            partial(self._workspace.partials, len(decodes.context_lens)),
        )
        if decodes.new_rows is not None:
            decodes.new_rows.keep(layer, self._stages.keys_values(state)[:, rows])
