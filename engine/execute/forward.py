"""One sub-batch's way through the layers; `pipeline` draws how two of them overlap."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from neo_desktop.engine.batch import ScheduledSequence, SubBatch
from neo_desktop.engine.cuda.copies import upload
from neo_desktop.engine.execute.attention import PlaceBatch, place_batches
from neo_desktop.engine.execute.lane import Signal
from neo_desktop.engine.execute.lanes import Lanes
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.kv.layer import Rows
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.kv.transfer import Carrier, HostBuffer
from neo_desktop.engine.placement import Place
from neo_desktop.models.stages import Scratch, Stages, State


@dataclass(frozen=True, slots=True)
class HandOff:
    """Buffers in host memory for what crosses over in one layer of one sub-batch."""

    inputs: HostBuffer  # q, k and v
    outputs: HostBuffer  # attention outputs


@dataclass(slots=True)
class _Attention:
    """One layer's attention of a sub-batch, under way, for its state."""

    layer: int
    q: Tensor  # [tokens, heads, head_dim]
    k: Tensor
    v: Tensor  # likewise [tokens, kv_heads, head_dim]
    on_cpu: Signal | None = None  # the end of the CPU's part, if there is one


def num_last_rows(sequence: ScheduledSequence) -> int:
    """Return for how many of a sequence's tokens the hidden states after all layers are needed."""
    return sequence.num_pooled or int(sequence.sampling is not None)


class ForwardPass:
    """One sub-batch on its way through the layers.

    Args:
        index: of the sub-batch.
        scratch: of the device, for at least as many tokens.
        hand_off: buffers that nobody uses.
        carrier: of the swap lane.
    """

    def __init__(
        self,
        index: int,
        sub_batch: SubBatch,
        stages: Stages,
        scratch: Scratch,
        storage: KVStorage,
        lanes: Lanes,
        hand_off: HandOff,
        carrier: Carrier,
    ) -> None:
        self._index = index
        self._num_tokens = sub_batch.num_tokens
        self._stages = stages
        model, config = stages.decoder, stages.config
        self._lanes = lanes
        self._carrier = carrier
        self.cpu_attention_ns = 0

        batches = place_batches(sub_batch, storage)
        self._on_device = batches.get(Place.DEVICE)
        self._on_host = batches.get(Place.HOST)
        self._host_prefills = (
            [] if self._on_host is None else [g.attending_on(model.device) for g in self._on_host.prefills]
        )
        self._num_cpu_decodes = 0 if self._on_host is None else self._on_host.num_decodes

        sequences = sub_batch.sequences
        ends = accumulate(len(sequence.token_ids) for sequence in sequences)
        last_rows = [
            row
            for sequence, end in zip(sequences, ends, strict=True)
            for row in range(end - num_last_rows(sequence), end)
        ]
        self._last_rows = upload(last_rows, torch.int64, model.device)
        token_ids = [token_id for s in sequences for token_id in s.token_ids]
        positions = [position for s in sequences for position in range(s.start, s.context_len)]
        self._state = State.empty(config, self._num_tokens, model.dtype, model.device, scratch)
        stages.embed(
            upload(token_ids, torch.int64, model.device),
            upload(positions, torch.int64, model.device),
            self._state,
        )
        self._attention: _Attention | None = None  # of the layer reached
        self._stored: list[Signal] = []  # by layer, where there are prompts in host memory

        shape = (self._num_cpu_decodes, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        self._inputs = hand_off.inputs.view(shape, model.dtype)
        shape = (self._num_cpu_decodes, config.num_heads, config.head_dim)
        self._outputs = hand_off.outputs.view(shape, model.dtype)

        # Two buffers: one is read by the attention of a layer while the other is filled for the next.
        self._earlier = [self._earlier_buffers() for _ in range(2)]
        self._fetched: list[Signal | None] = [None, None]  # by buffer
        self._earlier_read = lanes.device.mark()

    def fetch_earlier(self, layer: int) -> None:
        """Start bringing what precedes the chunks in host memory to the device."""
        tokens = sum(chunk.start for group in self._host_prefills for chunk in group.chunks)
        if self._on_host is None or not tokens:
            return
        self._fetched[layer % 2] = self._lanes.swap.submit(
            self._stage("fetch earlier KV", layer, tokens),
            partial(self._fetch, layer, self._on_host),
            (self._earlier_read,),
        )

    def step(self, layer: int, window: int | None, copied: Sequence[Signal]) -> None:
        """Go from the attention of the layer before to that of this one.

        Args:
            window: tokens that each token sees, itself included; None: all before it.
            copied: signals to wait for before KV of this layer is stored or read.
        """
        attention = self._linear(layer)
        host = self._on_host
        if host is not None and host.num_decodes:
            self._hand_off(attention, host, window, copied)
        if host is not None and host.prefills:
            self._start_storing(attention, host, copied)
        if self._on_device is not None or (host is not None and host.prefills):
            self._attend_on_device(attention, window, copied)
        self._attention = attention

    def finish(self) -> Tensor:
        """Return the final hidden states [rows, hidden], normed; of a sequence `num_last_rows`, in order."""
        stages, state, rows = self._stages, self._state, self._last_rows
        self._collect()
        num_layers = stages.config.num_layers
        with self._lanes.device.span(self._stage("linear", num_layers, len(rows))):
            model = stages.decoder
            room = State.empty(stages.config, len(rows), model.dtype, model.device, state.scratch)
            last = state.select(rows, room)
            stages.post_attention(num_layers - 1, last)
            normed = torch.empty_like(last.residual)
            stages.final_norm(last, normed)
            return normed

    def _linear(self, layer: int) -> _Attention:
        """Compute the linear stages between two layers' attention."""
        stages, state, before = self._stages, self._state, self._collect()
        with self._lanes.device.span(self._stage("linear", layer, self._num_tokens)):
            if before is not None:
                stages.post_attention(before.layer, state)
            if self._host_prefills:  # their KV of layers before may still be on its way
                state.qkv = torch.empty_like(state.qkv)
            stages.pre_attention(layer, state)
            return _Attention(layer, *stages.heads(state))

    def _hand_off(
        self, attention: _Attention, host: PlaceBatch, window: int | None, copied: Sequence[Signal]
    ) -> None:
        """Bring q, k and v of the decodes in host memory there, and attend."""
        lanes, rows = self._lanes, host.decode_rows
        there = lanes.to_host.submit(
            self._stage("q, k, v", attention.layer, host.num_decodes),
            partial(self._send, attention.q[rows], attention.k[rows], attention.v[rows]),
            (lanes.device.mark(),),
        )
        attention.on_cpu = lanes.cpu.submit(
            self._stage("CPU attention", attention.layer, host.num_decodes),
            partial(self._attend_on_cpu, attention.layer, host, window),
            (there, *copied),
        )

    def _start_storing(self, attention: _Attention, host: PlaceBatch, copied: Sequence[Signal]) -> None:
        """Store K and V of the prompts in host memory there."""
        if attention.layer >= 2:
            self._stored[attention.layer - 2].wait()
        rows = host.prefill_rows
        stored = self._lanes.swap.submit(
            self._stage("store prompts' KV", attention.layer, host.num_prefill_tokens),
            partial(self._store, attention.layer, host, attention.k[rows], attention.v[rows]),
            (self._lanes.device.mark(), *copied),
        )
        self._stored.append(stored)

    def _attend_on_device(self, attention: _Attention, window: int | None, copied: Sequence[Signal]) -> None:
        layer, device = attention.layer, self._lanes.device
        q, k, v, out = attention.q, attention.k, attention.v, self._state.attention
        scale = self._stages.config.attention_scale
        fetched = self._fetched[layer % 2]
        device.wait(*copied, *(() if fetched is None else (fetched,)))
        with device.span(self._stage("attention", layer, self._num_tokens - self._num_cpu_decodes)):
            if self._on_device is not None:
                self._on_device.attend(layer, q, k, v, out, scale, window)
            for group, earlier in zip(self._host_prefills, self._earlier[layer % 2], strict=True):
                group.attend(q, *group.pack(k, v, earlier), out, scale, window)
        if fetched is not None:
            self._earlier_read = device.mark()

    def _collect(self) -> _Attention | None:
        """Let the device wait for the rest of the attention under way, and return it."""
        attention, host = self._attention, self._on_host
        if attention is not None and attention.on_cpu is not None and host is not None:
            arrived = self._lanes.to_device.submit(
                self._stage("o", attention.layer, host.num_decodes),
                partial(self._state.attention[host.decode_rows].copy_, self._outputs, non_blocking=True),
                (attention.on_cpu,),
            )
            self._lanes.device.wait(arrived)
        return attention

    # What the other lanes run.

    def _send(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self._inputs.copy_(torch.cat((q, k, v), dim=1), non_blocking=True)

    def _attend_on_cpu(self, layer: int, host: PlaceBatch, window: int | None) -> None:
        started_ns = time.perf_counter_ns()
        config = self._stages.config
        k_head, v_head = config.num_heads, config.num_heads + config.num_kv_heads
        q, k, v = self._inputs[:, :k_head], self._inputs[:, k_head:v_head], self._inputs[:, v_head:]
        host.attend_decodes(layer, q, k, v, self._outputs, config.attention_scale, window)
        self.cpu_attention_ns += time.perf_counter_ns() - started_ns

    def _store(self, layer: int, host: PlaceBatch, k: Tensor, v: Tensor) -> None:
        host.store_prefills(layer, *self._carrier.to_host(k, v))

    def _fetch(self, layer: int, host: PlaceBatch) -> None:
        cache = host.pool.layer(layer)
        for group, buffers in zip(host.prefills, self._earlier[layer % 2], strict=True):
            for chunk, earlier in zip(group.chunks, buffers, strict=True):
                if earlier is not None:
                    self._carrier.fetch(cache, chunk.earlier_slots, earlier)

    def _earlier_buffers(self) -> list[list[Rows | None]]:
        """Make room on the device for one layer of what precedes each chunk in host memory, by group."""
        model, config = self._stages.decoder, self._stages.config

        def room(tokens: int) -> Rows | None:
            shape = (2, tokens, config.num_kv_heads, config.head_dim)
            return torch.empty(shape, dtype=model.dtype, device=model.device) if tokens else None

        return [[room(chunk.start) for chunk in group.chunks] for group in self._host_prefills]

    def _stage(self, name: str, layer: int, tokens: int) -> Stage:
        return Stage(name, layer, self._index, tokens)
