"""Memory budgets: the size of the KV cache and its division among the tiers.

    GPU memory                                    host memory
    | others | weights | KV | activations | reserve |     | others | weights* | KV and buffers | left alone |
             <---------- gpu cap ------------------>                          <--- cpu cap ---->

The use by other programs follows from the memory that is free after the weights are loaded and the largest
iterations have run (`warm_up`). The memory of CUDA and its libraries is then known as well, and the reserve
shrinks to a margin. Before a model is loaded, or for GPUs that are not present, the reserve covers both.
(*) Only without a GPU: both pools are then in host memory, and each cap limits the KV of its own pool.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch

from neo_desktop.engine.execute.layout import Capacity
from neo_desktop.engine.execute.prefill import PACKED_TOKENS
from neo_desktop.engine.execute.prefill_kernels import PIECE_SCORES, PrefillKernel, choose_kernel, kernel_on
from neo_desktop.engine.execute.workspace import device_bytes
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kv.layer import block_bytes
from neo_desktop.engine.kv.layout import BLOCK_SIZE, full_runs, in_whole_runs
from neo_desktop.engine.kv.states import SLOTS_PER_REQUEST
from neo_desktop.engine.kv.streamed import layers_of
from neo_desktop.engine.kv_tier import ALL_TIERS, MEASURED_TIERS, KVTier
from neo_desktop.engine.options import GIB, MAX_BATCH_TOKENS, EngineOptions
from neo_desktop.engine.profiling.hardware import find_gpus, host_memory
from neo_desktop.engine.sampler import MOST_COPIES, PIECE_ELEMENTS
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.models.config import ModelConfig

# Of a GPU: CUDA context, kernels, libraries, a piece of dequantised weights, and the margin.
DEVICE_RESERVE_BYTES = 512 * 1024**2
MANY_PROGRAMS = 1024  # thread blocks of decode attention that a large GPU runs at once;
DEVICE_MARGIN_BYTES = 256 * 1024**2  # for up to 128 graphs of 1 MiB, and fragmentation;
HOST_SHARE = 0.5  # of the available host memory, for KV and buffers without a cap
MOST_HOST_SHARE = 0.9  # of the available host memory, with any cap
_AMPERE = 8, 0  # compute capability
LONG_CONTEXT_TOKENS = 32_768  # longer prompts may have to be retried in smaller chunks
STREAMED_SHARE = 0.125  # of the GPU's KV memory, for the prefetch buffer of streamed KV
CHAT_TOKENS = 4096  # context of a usual chat
STATES_SHARE = 0.2  # least share of recurrent states in their memory and that of KV
LEAST_SLOTS = 2 * SLOTS_PER_REQUEST  # of states: two requests, or one, planned ahead, and a checkpoint
CHECKPOINTS = 40  # slots beyond those of the most requests, for drafts as well


def limits_of(options: EngineOptions, device: torch.device) -> SchedulerLimits:
    """Return the scheduler's limits for these options."""
    most = options.most_requests
    return SchedulerLimits(
        max_batch_tokens=options.max_batch_tokens or max(MAX_BATCH_TOKENS[device.type], most),
        max_batch_requests=most,
        max_token_ms=options.max_token_ms,
    )


def chat_lengths(config: ModelConfig) -> list[int]:
    """Return the lengths of chats that memory is planned for, in tokens: a usual one, doubled and doubled."""
    most = config.max_context_tokens
    doublings = range((most // CHAT_TOKENS).bit_length())
    return [CHAT_TOKENS << each for each in doublings] or [most]


def most_slots(limits: SchedulerLimits) -> int:
    """Return the most slots for recurrent states that are of use."""
    return SLOTS_PER_REQUEST * limits.max_batch_requests + CHECKPOINTS


def num_slots(
    config: ModelConfig,
    limits: SchedulerLimits,
    room: float,
    token_bytes: float,
    kept_tokens: int | None = None,
) -> int:
    """Return the slots for a model's recurrent states; 0: it has none.

    More slots let more requests run, whose KV has room in host memory. But one long chat keeps its KV on the
    device: of the lengths in `chat_lengths`, the longest that leaves a share for states. States get the rest.

    Args:
        room: bytes on the device for KV and states.
        token_bytes: bytes of KV per token.
        kept_tokens: tokens whose KV stays on the device; None: see above.
    """
    if not config.state_bytes:
        return 0
    if kept_tokens is None:
        most = (1 - STATES_SHARE) * room
        kept = max((n * token_bytes for n in chat_lengths(config) if n * token_bytes <= most), default=most)
    else:
        kept = kept_tokens * token_bytes
    return max(min(int(room - kept) // config.state_bytes, most_slots(limits)), LEAST_SLOTS)


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Free memory after the weights are loaded."""

    host_bytes: int
    gpu_bytes: int | None  # None: no GPU is used
    iteration_bytes: int | None = None  # GPU memory of iterations, see `warm_up`; None: not measured

    @classmethod
    def now(cls, device: torch.device, iteration_bytes: int | None = None, ranks: int = 1) -> Self:
        """Query the system and a GPU device; `ranks` processes share the system's memory."""
        gpu = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        return cls(host_memory().available_bytes // ranks, gpu, iteration_bytes)

    @property
    def device_bytes(self) -> int:
        """Free memory of the device that computes."""
        return self.host_bytes if self.gpu_bytes is None else self.gpu_bytes

    def without(self, taken: int) -> Self:
        """Return the free memory after `taken` bytes of the device are allocated."""
        if self.gpu_bytes is None:
            return replace(self, host_bytes=self.host_bytes - taken)
        return replace(self, gpu_bytes=self.gpu_bytes - taken)


class KVBudget:
    """Division of the memory beside the weights among states of recurrent layers and KV tiers.

    Args:
        free: free memory after the weights are loaded.
        weight_bytes: of the loaded model.
        tiers: tiers in use. Streamed KV takes its memory from the other tiers.
        bus_share: bus bandwidth / GPU memory bandwidth; None: unmeasured.
        has_host_weights: weights cross the bus, so `auto` streams no KV.
        planned_tokens: tokens whose KV has room on the GPU in the plan of the weights; None: not planned.

    Raises:
        MemoryError: the GPU has no room for one iteration.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        options: EngineOptions,
        free: FreeMemory,
        weight_bytes: int,
        tiers: Collection[KVTier],
        bus_share: float | None = None,
        *,
        has_host_weights: bool = False,
        planned_tokens: int | None = None,
    ) -> None:
        self._config, self._dtype, self._device, self._options = config, dtype, device, options
        self._limits = limits_of(options, device)
        self._free, self._weight_bytes = free, weight_bytes
        self._tiers, self._bus_share, self._has_host_weights = tiers, bus_share, has_host_weights
        self._asked = cache_tokens_of(options)
        self.num_states = self._num_slots(planned_tokens)
        states = self.num_states * config.state_bytes
        self._free, self._weight_bytes = free.without(states), weight_bytes + states
        # Contexts of this many tokens at most; further memory would be useless.
        self._most_tokens = self._limits.max_batch_requests * config.max_context_tokens
        self.available = {tier: self._bytes_for(tier) for tier in MEASURED_TIERS}

    def num_blocks(self) -> dict[KVTier, int]:
        """Return `tier -> blocks`, in whole runs, the unit of allocation in host memory.

        No tier gets more than the maximum number of requests with the longest contexts can use.

        Raises:
            MemoryError: a requested size exceeds the free memory.
        """
        available = dict(self.available)
        blocks = {tier: self._take_streamed(tier, available) for tier in self._tiers if tier.is_streamed}
        for tier, bytes_ in available.items():
            if tier not in self._tiers:
                continue
            dtype = self.dtype_of(tier)
            bytes_per_block = self._config.num_layers * block_bytes(self._config, BLOCK_SIZE, dtype)
            fitting = full_runs(bytes_ // bytes_per_block) * BLOCK_SIZE
            asked = self._asked[tier]
            if asked is not None and asked > fitting:
                needed = asked * bytes_per_block / BLOCK_SIZE
                raise MemoryError(
                    f"a {tier.title} of {asked} tokens needs {needed / 1e9:.2f} GB of KV, "
                    f"but {bytes_ / 1e9:.2f} GB are free for it: ask for at most {fitting} tokens"
                )
            blocks[tier] = (min(fitting, self._most_tokens) if asked is None else asked) // BLOCK_SIZE
        return {tier: blocks[tier] for tier in self._tiers}

    @property
    def most_requests(self) -> int:
        most = self._limits.max_batch_requests
        return min(most, self.num_states // SLOTS_PER_REQUEST) if self.num_states else most

    def _num_slots(self, planned_tokens: int | None) -> int:
        """Return the slots for states; the prefetch buffer of streamed KV comes from the memory of KV."""
        config, limits, free = self._config, self._limits, self._free
        if free.gpu_bytes is None:
            return num_slots(config, limits, STATES_SHARE * free.host_bytes, 0, 0)
        device = next(tier for tier in MEASURED_TIERS if not tier.in_host_memory)
        room: float = self._bytes_for(device)
        token_bytes: float = config.kv_bytes_per_token(self._dtype)
        for streamed in (tier for tier in self._tiers if tier.is_streamed):
            asked = self._asked[streamed]
            if asked is None and not self._has_host_weights:
                room -= 2 * limits.max_batch_requests * token_bytes
                token_bytes /= 1 - STREAMED_SHARE
            elif asked:
                on_device, _ = layers_of(config.num_layers)
                room -= 2 * limits.max_batch_requests * token_bytes
                room -= asked // BLOCK_SIZE * on_device * block_bytes(config, BLOCK_SIZE, self._dtype)
        asked = self._asked[device]
        kept = planned_tokens if asked is None else asked
        if kept is not None:
            kept = in_whole_runs(kept)
        slots = num_slots(config, limits, room, token_bytes, kept if device in self._tiers else 0)
        if slots and not any(tier.in_host_memory for tier in self._tiers):  # the device has their KV
            chat = SLOTS_PER_REQUEST * config.state_bytes + chat_lengths(config)[0] * token_bytes
            slots = max(min(slots, SLOTS_PER_REQUEST * int(room // chat)), LEAST_SLOTS)
        return slots

    def dtype_of(self, tier: KVTier) -> torch.dtype:
        is_int8 = tier.host_attends and self._options.cpu_cache_dtype == "int8"
        return torch.int8 if is_int8 else self._dtype

    def _take_streamed(self, streamed: KVTier, available: dict[KVTier, int]) -> int:
        """Return the blocks of streamed KV, and deduct their memory from the other tiers.

        The limits are the KV that crosses the bus while the GPU reads weights and its own KV once, and a
        share of the GPU's memory. Requested sizes of other tiers remain. Without a GPU, all KV is already
        where it is needed.
        """
        config, asked, has_gpu = self._config, self._asked[streamed], self._free.gpu_bytes is not None
        is_optional = asked is None and any(tier.host_attends for tier in self._tiers)
        if is_optional and (not has_gpu or self._has_host_weights):
            return 0
        layer_bytes = block_bytes(config, BLOCK_SIZE, self._dtype)
        on_device, on_host = (layers * layer_bytes for layers in layers_of(config.num_layers))
        if not has_gpu:  # both kinds of KV are in host memory
            on_device, on_host = 0, on_device + on_host
        # The device keeps the new KV of decodes until it has been copied to host memory.
        decodes = 2 * self._limits.max_batch_requests * config.kv_bytes_per_token(self._dtype)
        device, host = (
            next(tier for tier in available if tier.in_host_memory is in_host) for in_host in (False, True)
        )
        rest, most = available[device] - decodes, self._most_tokens // BLOCK_SIZE
        far = available[host] if host not in self._tiers or asked is not None else available[host] // 2
        fitting = far // on_host if on_host else most
        if on_device:
            others = in_whole_runs(self._asked[device] or 0) // BLOCK_SIZE * config.num_layers * layer_bytes
            near = rest if asked is not None else min(int(rest * STREAMED_SHARE), rest - others)
            fitting = min(fitting, near // on_device)
            if self._bus_share is not None and on_host:
                most = min(most, int(self._bus_share * (self._weight_bytes + rest) / on_host))
        fitting = max(full_runs(fitting), 0)
        blocks = min(fitting, full_runs(most)) if asked is None else asked // BLOCK_SIZE
        if blocks > fitting:
            raise MemoryError(
                f"a {streamed.title} of {asked} tokens needs {blocks * on_device / 1e9:.2f} GB of GPU "
                f"memory and {blocks * on_host / 1e9:.2f} GB of host memory, but {max(rest, 0) / 1e9:.2f} GB "
                f"and {far / 1e9:.2f} GB are free for it: ask for at most {fitting * BLOCK_SIZE} tokens"
            )
        available[device] -= blocks * on_device + (decodes if on_device else 0)
        available[host] -= blocks * on_host
        return blocks

    def _bytes_for(self, tier: KVTier) -> int:
        """Return the bytes for KV in a tier, if it is the only one in its memory."""
        host, gpu, options = self._free.host_bytes, self._free.gpu_bytes, self._options
        cap = options.cpu_memory_bytes if tier.in_host_memory else options.gpu_memory_bytes
        if gpu is None:  # without a GPU, all tiers share host memory
            return _host_bytes(host // len(MEASURED_TIERS), cap)
        if tier.in_host_memory:
            return max(_host_bytes(host, cap) - host_buffer_bytes(self._config, self._limits, self._dtype), 0)
        # The longest contexts are only estimated: to measure them would take as much KV.
        measured = self._free.iteration_bytes
        activations = activation_bytes(self._config, self._limits, self._dtype, self._device)
        activations = max(activations, measured or 0)
        needed = activations + (DEVICE_RESERVE_BYTES if measured is None else DEVICE_MARGIN_BYTES)
        if gpu < needed:
            raise MemoryError(
                f"with the weights loaded, {gpu / 1e9:.2f} GB of GPU memory are free, but an iteration needs "
                f"{needed / 1e9:.2f} GB beside KV{other_programs()}: close other programs, choose a "
                "smaller model or smaller iterations (max_batch_tokens)"
            )
        if cap is None:
            return gpu - needed
        # The cap includes the memory of CUDA and its libraries.
        under_cap, weights = activations + DEVICE_RESERVE_BYTES, self._weight_bytes
        if cap < weights + under_cap:
            raise MemoryError(
                f"GPU memory is capped at {cap / GIB:.2f} GiB, but the weights take {weights / GIB:.2f} GiB "
                f"and an iteration {under_cap / GIB:.2f} GiB beside KV: raise the cap above "
                f"{(weights + under_cap) / GIB:.2f} GiB or choose a smaller model"
            )
        return min(gpu - needed, cap - weights - under_cap)


def cache_tokens_of(options: EngineOptions) -> dict[KVTier, int | None]:
    """Return `tier -> requested tokens`, of options like `gpu_cache_tokens`; None: as many as fit."""
    return {tier: getattr(options, f"{tier.label}_cache_tokens") for tier in ALL_TIERS}


def activation_bytes(
    config: ModelConfig, limits: SchedulerLimits, dtype: torch.dtype, device: torch.device | None = None
) -> int:
    """Return the peak memory of one iteration beside weights and KV.

    Linear stages reuse a fixed workspace (`Workspace`). A chunk of a long prompt, or several chunks of short
    prompts, need the earlier KV in contiguous form, twice while it is assembled. They also need a mask, if
    the kernel requires one. With a softcap they need a tile of scores and of weights in float32. Each sampled
    request has logits in the model's dtype, and the sampler copies some in float32.

    Args:
        device: device whose kernels run the attention; None, or an absent GPU: those of Ampere.
    """
    tokens = limits.max_batch_tokens
    context = max(min(config.max_context_tokens, LONG_CONTEXT_TOKENS), PACKED_TOKENS)
    layer_kv_bytes = config.kv_bytes_per_token(dtype) // config.num_layers
    mask_bytes = tokens * (1 + dtype.itemsize) if _needs_masks(config, dtype, device) else 0
    attention = context * (2 * layer_kv_bytes + mask_bytes)
    if config.attention_softcap is not None:
        scores = min(tokens * context * config.group_size, PIECE_SCORES)
        attention += 2 * torch.float32.itemsize * scores
    logits = limits.max_batch_requests * config.vocab_size
    sampling = MOST_COPIES * min(logits, max(PIECE_ELEMENTS, config.vocab_size)) * torch.float32.itemsize
    requests = limits.max_batch_requests
    capacity = Capacity.of(tokens, requests, config.max_context_tokens, BLOCK_SIZE)
    head = logits * dtype.itemsize + sampling
    return attention + head + device_bytes(config, dtype, capacity, MANY_PROGRAMS)


def _needs_masks(config: ModelConfig, dtype: torch.dtype, device: torch.device | None) -> bool:
    """Return True if prompt attention in some layer needs a mask."""
    if config.attention_softcap is not None:
        return True
    level = fallbacks.level("prompt_attention")
    is_absent = device is None or (device.type == "cuda" and not torch.cuda.is_available())
    choose = partial(choose_kernel, _AMPERE) if is_absent else partial(kernel_on, device)
    kernels = {choose(dtype, config.head_dim, window is not None, level) for window in config.layer_windows}
    return not kernels.isdisjoint((PrefillKernel.SDPA, PrefillKernel.MATH))


def host_buffer_bytes(config: ModelConfig, limits: SchedulerLimits, dtype: torch.dtype) -> int:
    """Return the bytes of the offload buffers: q, k, v and output of two sub-batches."""
    return 2 * limits.max_batch_tokens * 2 * config.qkv_rows * dtype.itemsize


def _host_bytes(available: int, cap: int | None) -> int:
    """Return the usable part of the available memory; with a cap it may exceed half."""
    if cap is None:
        return int(available * HOST_SHARE)
    return min(cap, int(available * MOST_HOST_SHARE))


def other_programs() -> str:
    """Name other programs that use the GPU, for error messages."""
    processes = [process for gpu in find_gpus()[0] for process in gpu.other_processes]
    named = [f"{p.name} (process {p.pid})" for p in processes[:3]]
    return f" (other programs there: {', '.join(named)})" if named else ""
