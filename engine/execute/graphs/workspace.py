"""The memory of decode iterations: graphs refer to it by its address, so it is taken once and never moves."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from neo_desktop.engine.cuda.copies import host_memory
from neo_desktop.engine.execute.graphs.bucket import Bucket, Most, Rows
from neo_desktop.engine.kernels.splits import num_splits
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.stages import Scratch, State
from neo_desktop.native.relay import empty_flags


@dataclass(frozen=True, slots=True)
class Inputs:
    """What an iteration is told of a sub-batch, all int32.

    Padding is token 0 at position 0, stored nowhere, with a context of 0 tokens.
    """

    token_ids: Tensor  # [rows]
    positions: Tensor  # [rows]
    slots: Tensor  # [rows]; -1: the KV is stored nowhere, or in host memory
    context_lens: Tensor  # [device rows]
    block_tables: Tensor  # [device rows, max_blocks]


@dataclass(frozen=True, slots=True)
class HandOver:
    """Host memory through which a sub-batch and the relay give each other a layer's q, k, v and output."""

    qkv: Tensor  # [host rows, heads + 2 * kv_heads, head_dim]
    out: Tensor  # [host rows, heads, head_dim]
    flags: Tensor  # see `native.relay.empty_flags`


@dataclass(frozen=True, slots=True)
class SubBatchMemory:
    """Views of what one sub-batch of a bucket works in; rows with KV on the device come first."""

    index: int
    rows: Rows
    inputs: Inputs  # on the device
    staged: Inputs  # in host memory, to be filled in
    state: State
    hand_over: HandOver


class Workspace:
    """The memory of all graphs of a model.

    Args:
        config: the model's.
        dtype: likewise.
        device: likewise.
        most: the largest bucket's sizes.
        num_programs: of decode attention, that the GPU runs at once.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, most: Most, num_programs: int
    ) -> None:
        max_rows, max_blocks = most.rows, most.blocks

        def room(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=of, device=device)

        self._config = config
        self._num_programs = num_programs
        on_host: list[Tensor] = []

        def shared(make: Callable[[bool], Tensor]) -> Tensor:
            on_host.append(host_memory(make, device))
            return on_host[-1]

        num_ints = 2 * max_rows * (4 + max_blocks)
        self._ints = room(num_ints, of=torch.int32)
        self._staged = shared(lambda pin: torch.zeros(num_ints, dtype=torch.int32, pin_memory=pin))
        scratch = Scratch.empty(config, max_rows, dtype, device)
        self._states = [State.empty(config, max_rows, dtype, device, scratch) for _ in range(2)]
        for state in self._states:
            state.attention.zero_()  # of rows of which nobody attends, something finite
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._hand_overs = [
            HandOver(
                shared(
                    lambda pin: torch.zeros(
                        max_rows, heads + 2 * kv_heads, head_dim, dtype=dtype, pin_memory=pin
                    )
                ),
                shared(lambda pin: torch.zeros(max_rows, heads, head_dim, dtype=dtype, pin_memory=pin)),
                shared(lambda pin: empty_flags(config.num_layers, pinned=pin)),
            )
            for _ in range(2)
        ]
        # Where contexts are cut at all, parts are at most as many as keep the GPU busy (see `num_splits`).
        parts = heads * (num_programs // kv_heads)
        self._partial_out = room(parts * head_dim, of=torch.float32)
        self._partial_lse = room(parts, of=torch.float32)
        # Of all rows, those of sub-batch 0 first.
        self.last_hidden = room(2 * max_rows, config.hidden_size)  # normalised
        self.logits = room(2 * max_rows, config.vocab_size)
        # The most probable token of each row, or `sampler.NO_TOKEN`; in host memory.
        self.tokens = shared(lambda pin: torch.zeros(2 * max_rows, dtype=torch.int64, pin_memory=pin))
        # Whether graphs can use it: what they copy from and to in host memory must be pinned.
        self.fits_graphs = device.type == "cpu" or all(tensor.is_pinned() for tensor in on_host)

    def sub_batches(self, bucket: Bucket) -> tuple[SubBatchMemory, ...]:
        """Return the memory of a bucket's sub-batches; that of all buckets overlaps."""
        memories = []
        begin = 0
        for index, rows in enumerate(bucket.sub_batches):
            shapes = ((rows.count,),) * 3 + ((rows.device,), (rows.device, bucket.max_blocks))
            on_device, staged = (_cut(ints, begin, shapes) for ints in (self._ints, self._staged))
            begin += sum(map(math.prod, shapes))
            hand_over = self._hand_overs[index]
            memories.append(
                SubBatchMemory(
                    index=index,
                    rows=rows,
                    inputs=on_device,
                    staged=staged,
                    hand_over=HandOver(
                        hand_over.qkv[: rows.host], hand_over.out[: rows.host], hand_over.flags
                    ),
                    state=self._states[index].first(rows.count),
                )
            )
        return tuple(memories)

    def inputs(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Return the inputs of all sub-batches of a bucket in one piece: on the device, and staged."""
        count = sum(3 * rows.count + rows.device * (1 + bucket.max_blocks) for rows in bucket.sub_batches)
        return self._ints[:count], self._staged[:count]

    def partials(self, rows: int, max_tokens: int) -> tuple[Tensor, Tensor]:
        """Return `partial_out` and `partial_lse` of `paged_decode`.

        Args:
            rows: of the device, in a sub-batch.
            max_tokens: that one of them may attend to.
        """
        config = self._config
        splits = num_splits(rows, config.num_kv_heads, max_tokens, self._num_programs)
        shape = (rows if splits > 1 else 0, config.num_heads, splits)
        parts = math.prod(shape)
        return (
            self._partial_out[: parts * config.head_dim].view(*shape, config.head_dim),
            self._partial_lse[:parts].view(shape),
        )


def _cut(ints: Tensor, begin: int, shapes: tuple[tuple[int, ...], ...]) -> Inputs:
    views = []
    for shape in shapes:
        end = begin + math.prod(shape)
        views.append(ints[begin:end].view(shape))
        begin = end
    return Inputs(*views)
