"""Carries out plans: two sub-batches whose GPU and CPU work overlap (NEO, sections 3.1 and 3.3).

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
both. Without KV in host memory and without copies only `device` is used, and no other thread wakes.

Prompts are always attended to on the device. Those whose KV lives in host memory have it stored there layer
by layer, behind the computation of later layers; what precedes such a chunk is fetched one layer ahead.

Who waits for whom, besides the chain linear → to-host → cpu → to-device → linear of a sub-batch:

- whatever attends or stores in layer l: the copies of layer l. They run one layer ahead, in the plan's
  order, so a block that a move gives up can be given to somebody else in the same iteration;
- attention of a chunk in layer l: the earlier KV of layer l;
- fetching the earlier KV of layer l: the attention of layer l - 2, which reads the same one of two buffers;
- storing the prompts' KV of layer l: the storing of layer l - 2, so that tensors do not pile up.

Each sub-batch has one set of buffers for q, k, v and o, used by all layers: the chain orders all its uses.
Tensors that another lane reads are referred to until the signal of that lane has come: torch's allocator
does not know of uses on other streams.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from neo_desktop.engine.batch import (
    DeviceMemoryError,
    FloatArray,
    IterationPlan,
    IterationResult,
    IterationTiming,
    SampledToken,
)
from neo_desktop.engine.cuda.copies import download, upload
from neo_desktop.engine.cuda.errors import EngineLostError, device_lost, is_device_lost, is_out_of_memory
from neo_desktop.engine.cuda.streams import Streams, WholeDevice
from neo_desktop.engine.cuda.waiting import wait_for_gpu
from neo_desktop.engine.execute.executor import Executor, Wait
from neo_desktop.engine.execute.forward import ForwardPass, HandOff, num_last_rows
from neo_desktop.engine.execute.lane import Signal
from neo_desktop.engine.execute.lanes import Lanes
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, Stage, Timeline
from neo_desktop.engine.kv.storage import CopyGroup, KVStorage
from neo_desktop.engine.kv.transfer import Carrier, HostBuffer
from neo_desktop.engine.sampler import start_sampling
from neo_desktop.engine.waiting import DEFAULT_PATIENCE, Patience
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.stages import Scratch, Stages

T = TypeVar("T")


class PipelineExecutor(Executor):
    """Runs plans on a model's device and the CPU beside it.

    `start` and what it returns are called by one thread, `close` by any.

    Args:
        model: gives the linear stages.
        storage: holds the KV.
        timeline: records what every lane does.
        streams: what the work on the model's device runs on; None: on the whole of it.
        lanes: for tests; None: those that fit the model's device.
        patience: with stages of an iteration; when it ends, the executor is lost.
    """

    def __init__(
        self,
        model: Decoder,
        storage: KVStorage,
        timeline: Timeline | None = None,
        *,
        streams: Streams | None = None,
        lanes: Lanes | None = None,
        patience: Patience = DEFAULT_PATIENCE,
    ) -> None:
        self._model = model
        self._stages = Stages(model)
        self._storage = storage
        self._timeline = timeline
        self._streams = streams or WholeDevice(model.device)
        self._lanes = lanes or Lanes.for_device(self._streams, timeline)
        self._patience = patience
        self._watch = patience.watch()  # of the iteration
        self._carrier = Carrier(model.config, model.dtype, model.device, patience)
        self._hand_offs = tuple(HandOff(HostBuffer(model.device), HostBuffer(model.device)) for _ in range(2))
        self._is_closed = False
        self._lost: EngineLostError | None = None

    @property
    def lost(self) -> EngineLostError | None:
        """Why nothing can be computed any more; None: it can."""
        return self._lost

    def start(self, plan: IterationPlan) -> Wait:
        """See `Executor`."""
        if self._is_closed:
            raise RuntimeError("the executor is closed")
        if self._lost is not None:
            raise self._lost.with_traceback(None)
        if self._model.device.type == "cpu":  # no device works beside this thread
            return partial(self._attempt, partial(self._carry_out, plan))
        return partial(self._attempt, self._attempt(partial(self._submit, plan)))

    def _carry_out(self, plan: IterationPlan) -> IterationResult:
        return self._submit(plan)()

    def _attempt(self, work: Callable[[], T]) -> T:
        """Do a part of an iteration; when it fails, nothing of the iteration is under way any more."""
        try:
            with self._streams.on_device(), torch.inference_mode():
                if self._is_closed:
                    raise RuntimeError("the executor is closed")
                return work()
        except BaseException as error:
            lost = self._abandon(device_lost(error) if is_device_lost(error) else error)
            if self._timeline is not None:
                self._timeline.end_iteration(completed=False)
            if self._is_closed and isinstance(error, Exception):
                raise RuntimeError("the executor was closed in the middle of an iteration") from error
            if lost is not None and lost is not error:
                raise lost from error
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        # The error held the attempt's frames, and they its tensors; some still do in a circle.
        gc.collect()
        torch.cuda.empty_cache()
        raise DeviceMemoryError(reason)

    def _abandon(self, error: BaseException) -> EngineLostError | None:
        """End what is under way; return why nothing can be done any more, if that is so."""
        try:
            with self._streams.on_device():
                lost = self._lanes.abandon(error)
        except RuntimeError as another:  # of a GPU that does not take streams any more
            if not is_device_lost(another):
                raise
            lost = device_lost(another)
        if lost is not None:
            self._lost = self._lost or lost
            self._watch.give_up()
        return self._lost

    def close(self) -> None:
        """End all threads, also in the middle of an iteration, and write the timeline if it has a file.

        What does not end within the patience is left behind.
        """
        self._is_closed = True
        self._lanes.close()
        if self._model.device.type == "cuda" and self._lost is None:
            with suppress(RuntimeError), self._streams.on_device():  # whoever waits for it is told
                wait_for_gpu(torch.cuda.current_stream(self._model.device), self._patience.watch())
        if self._timeline is not None:
            self._timeline.close()

    def _submit(self, plan: IterationPlan) -> Wait:
        """Give all work of an iteration to the lanes; return what waits for them."""
        if self._timeline is not None:
            self._timeline.begin_iteration(self._model.device)
        started_ns = time.perf_counter_ns()
        model, lanes = self._model, self._lanes
        self._watch = self._patience.watch(plan.predicted.total_ms)
        lanes.begin(self._watch)
        most_tokens = max(sub_batch.num_tokens for sub_batch in plan.sub_batches)
        scratch = Scratch.empty(model.config, most_tokens, model.dtype, model.device)
        passes = [
            ForwardPass(
                index, sub_batch, self._stages, scratch, self._storage, lanes, hand_off, self._carrier
            )
            for index, (sub_batch, hand_off) in enumerate(
                zip(plan.sub_batches, self._hand_offs, strict=False)
            )
            if sub_batch.sequences
        ]
        copies = _Copies(self._storage.copy_groups(plan.copies), lanes, self._carrier)
        set_up = lanes.device.mark()

        def fetch(layer: int) -> None:
            copies.submit(layer, set_up)
            for sub_batch in passes:
                sub_batch.fetch_earlier(layer)

        num_layers = model.config.num_layers
        fetch(0)
        for layer, window in enumerate(model.config.layer_windows):
            if layer + 1 < num_layers:
                fetch(layer + 1)
            for sub_batch in passes:
                sub_batch.step(layer, window, copies.done[layer])

        sampling = [(s.request_id, s.sampling) for s in plan.sequences if s.sampling is not None]
        tokens: Callable[[], Sequence[SampledToken | None]] = tuple
        pooled: Callable[[], Mapping[str, FloatArray]] = dict
        if any(num_last_rows(sequence) for sequence in plan.sequences):
            last = torch.cat([sub_batch.finish() for sub_batch in passes])
            pooled, last = self._start_pooling(last, plan)
        if sampling:
            with lanes.device.span(Stage("sample", num_layers, NO_SUB_BATCH, len(sampling))):
                room = last.new_empty(len(last), model.config.vocab_size)
                logits = self._stages.logits(last, room).float()
                tokens = start_sampling(logits, [item for _, item in sampling])

        def wait() -> IterationResult:
            lanes.join()
            chosen = tokens()
            timing = IterationTiming(
                total_ms=(time.perf_counter_ns() - started_ns) / 1e6,
                cpu_attention_ms=sum(sub_batch.cpu_attention_ns for sub_batch in passes) / 1e6,
            )
            if self._timeline is not None:
                self._timeline.end_iteration()
            names = [request_id for request_id, _ in sampling]
            return result_of(names, chosen, model.dtype, timing, pooled())

        return wait

    def _start_pooling(
        self, last: Tensor, plan: IterationPlan
    ) -> tuple[Callable[[], Mapping[str, FloatArray]], Tensor]:
        """Start to sum the hidden states that are asked for; `last` is [rows, hidden] of all, normed.

        Returns:
            What waits for the sums, and the rows that are to be sampled.
        """
        if not any(sequence.num_pooled for sequence in plan.sequences):
            return dict, last
        sampled: list[int] = []
        names, sums = [], []
        first = 0
        for sequence in plan.sequences:
            end = first + num_last_rows(sequence)
            if sequence.num_pooled:
                names.append(sequence.request_id)
                sums.append(last[first:end].float().sum(dim=0))
            else:
                sampled += range(first, end)
            first = end
        arrived = download(torch.stack(sums))
        rows = upload(sampled, torch.int64, last.device)
        return lambda: dict(zip(names, arrived().numpy(), strict=True)), last[rows]


def result_of(
    request_ids: Sequence[str],
    tokens: Sequence[SampledToken | None],
    dtype: torch.dtype,
    timing: IterationTiming,
    pooled: Mapping[str, FloatArray] | None = None,
) -> IterationResult:
    """Return the result of an iteration whose sampler gave each of these requests a token, or none."""
    by_request = dict(zip(request_ids, tokens, strict=True))
    sums = pooled or {}
    damaged = [request_id for request_id, token in by_request.items() if token is None]
    damaged += [request_id for request_id, total in sums.items() if not np.isfinite(total).all()]
    return IterationResult(
        sampled={request_id: token for request_id, token in by_request.items() if token is not None},
        failed=dict.fromkeys(
            damaged,
            "the model's output is not finite: its weights may be damaged, or the numbers "
            f"exceed {dtype}; try another dtype",
        ),
        pooled=sums,
        timing=timing,
    )


class _Copies:
    """The block copies of an iteration, layer by layer."""

    def __init__(self, groups: Sequence[CopyGroup], lanes: Lanes, carrier: Carrier) -> None:
        self._groups = groups
        self._lanes = lanes
        self._carrier = carrier
        self._num_tokens = sum(len(group.source_slots) for group in groups)
        self.done: list[tuple[Signal, ...]] = []  # by layer: what to wait for

    def submit(self, layer: int, set_up: Signal) -> None:
        """Start a layer's copies."""
        if not self._groups:
            self.done.append(())
            return
        stage = Stage("copy blocks", layer, NO_SUB_BATCH, self._num_tokens)
        self.done.append((self._lanes.swap.submit(stage, partial(self._copy, layer), (set_up,)),))

    def _copy(self, layer: int) -> None:
        for group in self._groups:
            group.copy_layer(layer, self._carrier)
