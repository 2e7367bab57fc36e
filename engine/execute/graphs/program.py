"""A decode iteration as work for lanes: the order of `pipeline`, over memory that does not move."""

from functools import partial

import torch
from torch import Tensor

from neo_desktop.engine.execute.graphs.bucket import Bucket
from neo_desktop.engine.execute.graphs.streams import Lane, Mark, Recorder
from neo_desktop.engine.execute.graphs.workspace import SubBatchMemory, Workspace
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, Stage
from neo_desktop.engine.kernels.dispatch import paged_decode
from neo_desktop.engine.sampler import NO_TOKEN
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.operators import Store
from neo_desktop.models.stages import Stages
from neo_desktop.native.relay import DONE, READY


class DecodeProgram:
    """One bucket's iteration; called with a recorder, it gives all work to the lanes.

    What waits for what, besides the order of each lane and the flags:

    - q, k and v leave after the linear stage that made them;
    - the wait for the output comes after the flag that asks for it, and so after that linear stage, which has
      read the output's memory;
    - a linear stage waits for the output of the layer before.

    Through the flags and the relay that is enough for all memory that is used again in every layer: nothing
    writes q, k and v of a layer before the output of the layer before has arrived.

    Args:
        caches: K and V of the device, [num_layers, num_blocks, block_size, kv_heads, head_dim] each.
        block_size: tokens per block.
    """

    def __init__(
        self,
        bucket: Bucket,
        config: ModelConfig,
        stages: Stages,
        workspace: Workspace,
        caches: tuple[Tensor, Tensor],
        block_size: int,
    ) -> None:
        self.bucket = bucket
        self._config = config
        self._stages = stages
        self._workspace = workspace
        self._block_size = block_size
        self._k_caches, self._v_caches = caches
        self.memories = workspace.sub_batches(bucket)  # what the sub-batches work in

    def __call__(self, recorder: Recorder) -> None:
        """Record the iteration."""
        inputs, staged = self._workspace.inputs(self.bucket)
        recorder.run(
            Lane.DEVICE,
            Stage("inputs", 0, NO_SUB_BATCH, len(inputs)),
            partial(inputs.copy_, staged, non_blocking=True),
        )
        arrived: list[tuple[Mark, ...]] = [() for _ in self.memories]
        for layer, window in enumerate(self._config.layer_windows):
            for memory in self.memories:
                arrived[memory.index] = self._step(recorder, layer, window, memory, arrived[memory.index])
        first_row = 0
        for memory in self.memories:
            recorder.run(
                Lane.DEVICE,
                Stage("linear", self._config.num_layers, memory.index, memory.rows.count),
                partial(self._finish, memory, first_row),
                arrived[memory.index],
            )
            first_row += memory.rows.count
        recorder.run(
            Lane.DEVICE,
            Stage("sample", self._config.num_layers, NO_SUB_BATCH, first_row),
            partial(self._choose, first_row),
        )

    def _step(
        self,
        recorder: Recorder,
        layer: int,
        window: int | None,
        memory: SubBatchMemory,
        arrived: tuple[Mark, ...],
    ) -> tuple[Mark, ...]:
        """Record a layer up to its attention; return what the next one has to wait for."""
        index, rows, hand_over = memory.index, memory.rows, memory.hand_over
        linear = recorder.run(
            Lane.DEVICE,
            Stage("linear", layer, index, rows.count),
            partial(self._linear, layer, memory),
            arrived,
        )
        asked: Mark | None = None
        if rows.host:
            recorder.run(
                Lane.TO_HOST,
                Stage("q, k, v", layer, index, rows.host),
                partial(self._send, memory),
                (linear,),
            )
            asked = recorder.raise_flag(Lane.TO_HOST, hand_over.flags[READY, layer, :1])
        if rows.device:
            recorder.run(
                Lane.DEVICE,
                Stage("attention", layer, index, rows.device),
                partial(self._attend, layer, window, memory),
            )
        if asked is None:
            return ()
        recorder.wait_for_flag(Lane.TO_DEVICE, hand_over.flags[DONE, layer, :1], asked)
        output = memory.state.attention[rows.device :]
        return (
            recorder.run(
                Lane.TO_DEVICE,
                Stage("o", layer, index, rows.host),
                partial(output.copy_, hand_over.out, non_blocking=True),
            ),
        )

    # What the lanes run.

    def _linear(self, layer: int, memory: SubBatchMemory) -> None:
        inputs, state = memory.inputs, memory.state
        if layer == 0:
            self._stages.embed(inputs.token_ids, inputs.positions, state)
        else:
            self._stages.post_attention(layer - 1, state)
        store = Store(inputs.slots, self._k_caches[layer], self._v_caches[layer])
        self._stages.pre_attention(layer, state, store)

    def _send(self, memory: SubBatchMemory) -> None:
        rows = memory.state.qkv[memory.rows.device :]
        memory.hand_over.qkv.copy_(rows.view(memory.hand_over.qkv.shape), non_blocking=True)

    def _attend(self, layer: int, window: int | None, memory: SubBatchMemory) -> None:
        config, count = self._config, memory.rows.device
        max_tokens = self.bucket.max_blocks * self._block_size
        q, _, _ = self._stages.heads(memory.state)
        paged_decode(
            q[:count],
            self._k_caches[layer],
            self._v_caches[layer],
            memory.inputs.block_tables,
            memory.inputs.context_lens,
            memory.state.attention[:count],
            *self._workspace.partials(count, min(max_tokens, window or max_tokens)),
            config.attention_scale,
            window,
        )

    def _finish(self, memory: SubBatchMemory, first_row: int) -> None:
        self._stages.post_attention(self._config.num_layers - 1, memory.state)
        last_hidden = self._workspace.last_hidden[first_row : first_row + memory.rows.count]
        self._stages.final_norm(memory.state, last_hidden)

    def _choose(self, rows: int) -> None:
        """Greedily, for all rows; whoever samples in another way reads the logits."""
        logits = self._workspace.logits[:rows]
        self._stages.logits(self._workspace.last_hidden[:rows], logits)
        largest, tokens = logits.max(dim=-1)
        tokens = torch.where(largest.isfinite(), tokens, NO_TOKEN)
        self._workspace.tokens[:rows].copy_(tokens, non_blocking=True)
