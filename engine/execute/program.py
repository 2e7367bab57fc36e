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

Async decodes join the linear stages of sub-batch 0; no stage waits for their attention. See `async_decodes`.

Streamed KV arrives on the device one layer ahead, and its new rows leave afterwards: see `streamed`.

The CPU takes part in linear stages if matrices are offloaded: see `offloaded_matmuls`.
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
    """The stages of one iteration.

    Args:
        workspace: Working memory.
        memory: The iteration's part of the working memory.
        moves: Copies of blocks that change their tier.
        outputs: The requested outputs.
        chooses: True if the last part chooses the most probable token of every row.
        window: Prefetch of streamed KV; None: no sequence attends to streamed KV.
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
        self._moved: dict[int, tuple[Signal, ...]] = {}  # layer -> copies to wait for

    @property
    def key(self) -> object:
        """Graph key: programs with equal keys have the same fixed parts."""
        sets = tuple(each.async_decodes.old for each in self._passes if each.async_decodes is not None)
        return self.graph_key, self._has_cuts, self._chooses, self._window is not None, sets

    @property
    def graph_key(self) -> GraphKey:
        """The sizes of the iteration."""
        return self._memory.graph_key

    @property
    def is_fixed(self) -> bool:
        """True if the fixed parts can be graphs."""
        spans_vary = self._config.state_shapes and any(each.prompts for each in self._passes)
        has_images = any(each.images is not None for each in self._passes)
        is_possible = self._memory.is_fixed and self._stages.writes_in_place
        return is_possible and not spans_vary and not has_images

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
        """True if layers are fixed; streamed weights or KV flow through them, so all layers or none are."""
        return self._chooses or (self._stream is None and self._window is None)

    @property
    def _is_cut_at_sums(self) -> bool:
        """True if linear stages end at each all-reduce, which only pays with graphs."""
        return self._stages.is_part and self.is_fixed

    @property
    def _has_cuts(self) -> bool:
        """True if work that is not fixed precedes each layer."""
        return self._moves.has_any or any(
            prompts.fetches for each in self._passes for prompts in each.prompts
        )

    @property
    def transfers(self) -> list[HostTransfer]:
        """The CPU's transfers to and from pages, in the order of a layer."""
        prompts = [prompts for each in self._passes for prompts in each.prompts]
        ahead = [transfer for each in prompts for transfer in each.transfers_ahead]
        return [*self._moves.transfers, *ahead, *(t for each in prompts for t in each.transfers_behind)]

    @property
    def on_host(self) -> list[HostWork]:
        """The CPU's matmuls, attention and weight copies, in the device's order.

        The order is by sub-batch; async decodes follow the other decodes.
        """
        works: list[HostWork] = []
        for each in self._passes:
            works += [] if each.split is None else each.split.on_host
            works += [offload.batch for offload in each.offloaded]
            works += [] if each.async_decodes is None else each.async_decodes.batches
        works += self._ending.on_host
        if self._stream is not None and self._stream.staged is not None:
            works.append(self._stream.staged)
        return works

    def copies(self) -> tuple[float, float, int]:
        """Return the measured copies of streamed KV; see `PrefetchStream.measured`."""
        return (0.0, 0.0, 0) if self._window is None else self._window.measured()

    def end(self) -> None:
        """Finish a successful iteration: swap async buffers, and store new rows of streamed KV."""
        for each in self._passes:
            if each.async_decodes is not None:
                each.async_decodes.memory.end_turn()
            for decodes in each.decodes:
                if decodes.new_rows is not None:
                    decodes.new_rows.store()

    def parts(self) -> list[Part]:
        """Return the stages in order, divided into parts."""
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
            if not memory.is_fixed:  # its token table is its own
                latest = self._workspace.latest
                memory.table[: len(latest)].copy_(latest)

        launcher.run(Lane.DEVICE, Stage("inputs", 0, NO_SUB_BATCH, len(memory.inputs)), bring)

    def _bring_kv(self, layer: int, launcher: Launcher) -> None:
        """Start the copies and fetches that `layer` needs."""
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
        """Add the linear stages of a layer and the attention of its decodes.

        All-reduces are never fixed: they run between graphs.
        """
        is_fixed = self._has_fixed_layers
        if self._is_cut_at_sums:
            build.add(partial(self._begin_step, each, layer), is_fixed=is_fixed)
            steps = self._stages.steps(layer, each.memory.state, each.store(layer))
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
        """Submit the decode attention of the CPU and workers, and of the device in parallel."""
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
        """Submit the linear stages."""
        memory = each.memory
        stage = Stage("linear", layer, memory.index, memory.rows.count)
        after = self._collect(each, layer - 1, launcher)
        if each.split is None or self._stream is None:
            launcher.run(Lane.DEVICE, stage, partial(self._linear, each, layer), after)
            return
        if layer == 0:
            self._stream.bring(launcher)
            launcher.run(Lane.DEVICE, stage, partial(self._embed, each))
        steps = self._stages.steps(layer, memory.state, each.store(layer))
        each.split.advance(launcher, self._stream, stage, steps, after)

    def _collect(self, each: SubBatchPass, layer: int, launcher: Launcher) -> list[Signal]:
        """Submit the copies of the CPU's attention output; return their signals."""
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

    def _embed(self, each: SubBatchPass) -> None:
        memory = each.memory
        if memory.table is not None:
            torch.index_select(memory.table, 0, memory.inputs.sources, out=memory.token_ids)
        embed = self._stages.embed if each.images is None else each.images.embed
        embed(memory.token_ids, memory.inputs.positions, memory.state)

    def _linear(self, each: SubBatchPass, layer: int) -> None:
        if layer == 0:
            self._embed(each)
        self._stages.advance(layer, each.memory.state, each.store(layer))

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
