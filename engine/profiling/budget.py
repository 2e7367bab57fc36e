"""Memory budgets: the size of the KV cache and its division among the tiers.

    GPU memory                                    host memory
    | others | weights | KV | activations | reserve |     | others | weights* | KV and buffers | left alone |
             <---------- gpu cap ------------------>                          <--- cpu cap ---->

The use by other programs follows from the memory that is free after the weights are loaded and the largest
iterations have run (`warm_up`). The memory of CUDA and its libraries is then known as well, and the reserve
shrinks to a margin. Before a model is loaded, or for GPUs that are not present, the reserve covers both.
(*) Only without a GPU: both pools are then in host memory, and each cap limits the KV of its own pool.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch

from neo_desktop.engine.execute.layout import Capacity
from neo_desktop.engine.execute.prefill import PACKED_TOKENS
from neo_desktop.engine.execute.prefill_kernels import PIECE_SCORES, PrefillKernel, kernel_on
from neo_desktop.engine.execute.recurrent import num_slots
from neo_desktop.engine.execute.workspace import device_bytes
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.kv.layer import block_bytes
from neo_desktop.engine.kv.layout import BLOCK_SIZE, BLOCKS_PER_RUN
from neo_desktop.engine.kv.streamed import layers_of
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.options import MAX_BATCH_TOKENS, EngineOptions
from neo_desktop.engine.profiling.hardware import find_gpus, host_memory
from neo_desktop.engine.sampler import MOST_COPIES, PIECE_ELEMENTS
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.stored_form import uniform_form

# Of a GPU: CUDA context, kernels, libraries, a piece of dequantised weights, and the margin.
DEVICE_RESERVE_BYTES = 512 * 1024**2
MANY_PROGRAMS = 1024  # thread blocks of decode attention that a large GPU runs at once;
DEVICE_MARGIN_BYTES = 256 * 1024**2  # for up to 128 graphs of 1 MiB, and fragmentation;
HOST_SHARE = 0.5  # of the available host memory, for KV and buffers without a cap
MOST_HOST_SHARE = 0.9  # of the available host memory, with any cap
LONG_CONTEXT_TOKENS = 32_768  # longer prompts may have to be retried in smaller chunks
GIB = 1024**3
STREAMED_SHARE = 0.125  # of the GPU's KV memory, for the prefetch buffer of streamed KV
SHORT_TOKENS = 1000  # context that is too short to be useful
# GGUF file suffix -> dominant tensor type
QUANTISATIONS = {"Q8_0": "Q8_0", "Q6_K": "Q6_K", "Q5_K_M": "Q5_K", "Q4_K_M": "Q4_K", "Q4_0": "Q4_0"}


@dataclass(frozen=True, slots=True)
class MemoryCaps:
    """Limits on memory use; None: as much as fits."""

    gpu_bytes: int | None = None  # weights, activations, KV and reserve; without a GPU: KV of the GPU-cache
    cpu_bytes: int | None = None  # KV in host memory, and transfer buffers

    @classmethod
    def of(cls, options: EngineOptions) -> Self:
        """Return the caps of these options."""
        ranks = options.tensor_parallel  # each rank has its own GPU; the ranks share host memory
        gpu, host = options.gpu_memory_gib, options.cpu_memory_gib
        return cls(
            None if gpu is None else int(gpu * GIB), None if host is None else int(host * GIB) // ranks
        )


def limits_of(options: EngineOptions, device: torch.device) -> SchedulerLimits:
    """Return the scheduler's limits for these options."""
    most = options.most_requests
    return SchedulerLimits(
        max_batch_tokens=options.max_batch_tokens or max(MAX_BATCH_TOKENS[device.type], most),
        max_batch_requests=most,
        max_token_ms=options.max_token_ms,
    )


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


def pool_blocks(
    config: ModelConfig,
    dtype: torch.dtype,
    limits: SchedulerLimits,
    device: torch.device,
    cache_tokens: Mapping[KVTier, int | None],
    caps: MemoryCaps | None = None,
    cpu_cache_dtype: torch.dtype | None = None,
    free: FreeMemory | None = None,
    weight_bytes: int | None = None,
    tiers: Collection[KVTier] = MEASURED_TIERS,
    bus_share: float | None = None,
) -> dict[KVTier, int]:
    """Return `tier -> blocks` for the memory that is free after the weights are loaded.

    States of recurrent layers come first. No tier gets more than the maximum number of requests with the
    longest contexts can use. Blocks come in whole runs, the unit of allocation in host memory.

    Args:
        cache_tokens: `tier -> requested tokens`; None: as many as fit.
        caps: limits on memory use.
        cpu_cache_dtype: of KV in host memory; None: the model's.
        free: free memory; None: query it.
        weight_bytes: of the loaded model; None: all weights have `dtype`.
        tiers: tiers in use. Streamed KV takes its memory from the other tiers.
        bus_share: bus bandwidth / GPU memory bandwidth; None: unmeasured.

    Raises:
        MemoryError: the GPU has no room for one iteration, or a request exceeds the free memory.
    """
    free = free or FreeMemory.now(device)
    states = num_slots(config, limits.max_batch_requests, free.device_bytes) * config.state_bytes
    free = free.without(states)
    weights = states + (config.weight_bytes(dtype) if weight_bytes is None else weight_bytes)
    available = kv_bytes(config, dtype, limits, free, caps or MemoryCaps(), weights, device)
    most_tokens = limits.max_batch_requests * config.max_context_tokens
    blocks = {}
    for tier in tiers:
        if tier.is_streamed:
            blocks[tier] = _take_streamed(
                config, dtype, limits, tiers, available, free, cache_tokens, weights, bus_share
            )
    for tier, bytes_ in available.items():
        if tier not in tiers:
            continue
        kv_dtype = (cpu_cache_dtype if tier.host_attends else None) or dtype
        bytes_per_block = config.num_layers * block_bytes(config, BLOCK_SIZE, kv_dtype)
        bytes_per_token = bytes_per_block // BLOCK_SIZE
        fitting = bytes_ // (BLOCKS_PER_RUN * bytes_per_block) * BLOCKS_PER_RUN * BLOCK_SIZE
        asked = cache_tokens[tier]
        if asked is not None and asked > fitting:
            raise MemoryError(
                f"a {tier.title} of {asked} tokens needs {asked * bytes_per_token / 1e9:.2f} GB of KV, "
                f"but {bytes_ / 1e9:.2f} GB are free for it: ask for at most {fitting} tokens"
            )
        blocks[tier] = (min(fitting, most_tokens) if asked is None else asked) // BLOCK_SIZE
    return blocks


def _take_streamed(
    config: ModelConfig,
    dtype: torch.dtype,
    limits: SchedulerLimits,
    tiers: Collection[KVTier],
    available: dict[KVTier, int],
    free: FreeMemory,
    cache_tokens: Mapping[KVTier, int | None],
    weights: int,
    bus_share: float | None,
) -> int:
    """Return the blocks of streamed KV, and deduct their memory from the other tiers.

    The limits are the KV that crosses the bus while the GPU reads weights and its own KV once, and a share of
    the GPU's memory. Requested sizes of other tiers remain. Without a GPU, all KV is already where it is
    needed.
    """
    layer_bytes = block_bytes(config, BLOCK_SIZE, dtype)
    on_device, on_host = (layers * layer_bytes for layers in layers_of(config.num_layers))
    if free.gpu_bytes is None:  # both kinds of KV are in host memory
        on_device, on_host = 0, on_device + on_host
    # The device keeps the new KV of decodes until it has been copied to host memory.
    decodes = 2 * limits.max_batch_requests * config.kv_bytes_per_token(dtype)
    most = limits.max_batch_requests * config.max_context_tokens // BLOCK_SIZE
    device, host = (
        next(tier for tier in available if tier.in_host_memory is in_host) for in_host in (False, True)
    )
    (streamed,) = (tier for tier in tiers if tier.is_streamed)
    asked = cache_tokens.get(streamed)
    if asked is None and free.gpu_bytes is None and any(tier.host_attends for tier in tiers):
        return 0
    rest = available[device] - decodes
    far = available[host] if host not in tiers or asked is not None else available[host] // 2
    fitting = far // on_host if on_host else most
    if on_device:
        runs = -(-(cache_tokens[device] or 0) // (BLOCKS_PER_RUN * BLOCK_SIZE))
        others = runs * BLOCKS_PER_RUN * config.num_layers * layer_bytes
        near = rest if asked is not None else min(int(rest * STREAMED_SHARE), rest - others)
        fitting = min(fitting, near // on_device)
        if bus_share is not None and on_host:
            most = min(most, int(bus_share * (weights + rest) / on_host))
    fitting = max(fitting // BLOCKS_PER_RUN * BLOCKS_PER_RUN, 0)
    most = most // BLOCKS_PER_RUN * BLOCKS_PER_RUN
    blocks = min(fitting, most) if asked is None else asked // BLOCK_SIZE
    if blocks > fitting:
        raise MemoryError(
            f"a {streamed.title} of {asked} tokens needs {blocks * on_device / 1e9:.2f} GB of GPU "
            f"memory and {blocks * on_host / 1e9:.2f} GB of host memory, but {max(rest, 0) / 1e9:.2f} GB and "
            f"{far / 1e9:.2f} GB are free for it: ask for at most {fitting * BLOCK_SIZE} tokens"
        )
    available[device] -= blocks * on_device + (decodes if on_device else 0)
    available[host] -= blocks * on_host
    return blocks


def kv_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    limits: SchedulerLimits,
    free: FreeMemory,
    caps: MemoryCaps,
    weight_bytes: int | None = None,
    device: torch.device | None = None,
) -> dict[KVTier, int]:
    """Return `tier -> bytes for KV`; see `pool_blocks`."""
    host, buffers = free.host_bytes, host_buffer_bytes(config, limits, dtype)

    def bytes_of(tier: KVTier) -> int:
        cap = caps.cpu_bytes if tier.in_host_memory else caps.gpu_bytes
        if free.gpu_bytes is None:  # without a GPU, all tiers share host memory
            return _host_bytes(host // len(MEASURED_TIERS), cap)
        if tier.in_host_memory:
            return max(_host_bytes(host, cap) - buffers, 0)
        weights = config.weight_bytes(dtype) if weight_bytes is None else weight_bytes
        activations = activation_bytes(config, limits, dtype, device)
        return _device_bytes(activations, free.gpu_bytes, free.iteration_bytes, cap, weights)

    return {tier: bytes_of(tier) for tier in MEASURED_TIERS}


def check_weights_fit(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    caps: MemoryCaps,
    free_memory: FreeMemory | None = None,
    form: WeightFormat = DENSE,
) -> None:
    """Check that the weights fit, before they are loaded.

    Args:
        free_memory: at that time; None: query it.
        form: of the matrices.

    Raises:
        MemoryError: the weights exceed the free memory or the cap.
    """
    needed = config.loading_bytes(dtype, device, form)
    is_gpu = device.type == "cuda"
    memory = free_memory or FreeMemory.now(device)
    free = memory.host_bytes if memory.gpu_bytes is None else memory.gpu_bytes
    where = "GPU" if is_gpu else "host"
    if needed > free:
        raise MemoryError(
            f"loading the weights takes {needed / 1e9:.1f} GB in {dtype}, but only {free / 1e9:.1f} GB of "
            f"{where} memory are free{_other_programs() if is_gpu else ''}: "
            f"{smaller_form(config, dtype, device, free, needed)}close other programs, choose a 16-bit dtype "
            "or a smaller model"
        )
    if is_gpu and caps.gpu_bytes is not None and needed > caps.gpu_bytes:
        raise MemoryError(
            f"the weights take {needed / GIB:.1f} GiB in {dtype}, but GPU memory is capped at "
            f"{caps.gpu_bytes / GIB:.1f} GiB: {smaller_form(config, dtype, device, caps.gpu_bytes, needed)}"
            "raise the cap, choose a 16-bit dtype or a smaller model"
        )


def smaller_form(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, free: int, needed: int
) -> str:
    """Suggest a quantisation that leaves room for chats, as the start of a sentence; "": none does.

    Args:
        free: bytes for weights and KV.
        needed: bytes of the model without further quantisation.
    """
    if device.type == "cuda" and fallbacks.level("quantised") == "torch":
        return ""
    for name, type_name in QUANTISATIONS.items():
        form = uniform_form(config, type_name)
        bytes_ = config.loading_bytes(dtype, device, form if device.type == "cpu" else form.on_gpu(dispatch))
        left = free - bytes_
        room = (
            left - DEVICE_RESERVE_BYTES if device.type == "cuda" else left * HOST_SHARE / len(MEASURED_TIERS)
        )
        tokens = int(min(room // config.kv_bytes_per_token(dtype), config.max_context_tokens))
        if bytes_ < needed and tokens >= min(SHORT_TOKENS, config.max_context_tokens):
            return (
                f"a GGUF file of it in {name} would fit (about {bytes_ / 1e9:.1f} GB, and chats of up to "
                f"{tokens // 100 * 100:,} tokens); or "
            )
    return ""


def activation_bytes(
    config: ModelConfig, limits: SchedulerLimits, dtype: torch.dtype, device: torch.device | None = None
) -> int:
    """Return the peak memory of one iteration beside weights and KV.

    Linear stages reuse a fixed workspace (`Workspace`). A chunk of a long prompt, or several chunks of short
    prompts, need the earlier KV in contiguous form, twice while it is assembled. They also need a mask, if
    the kernel requires one. With a softcap they need a tile of scores and of weights in float32. Each sampled
    request has logits in the model's dtype and in float32, and the sampler copies some.

    Args:
        device: device whose kernels run the attention; None, or an absent GPU: any kernels, with masks.
    """
    tokens = limits.max_batch_tokens
    context = max(min(config.max_context_tokens, LONG_CONTEXT_TOKENS), PACKED_TOKENS)
    layer_kv_bytes = config.kv_bytes_per_token(dtype) // config.num_layers
    mask_bytes = tokens * (1 + dtype.itemsize) if device is None or _needs_masks(config, dtype, device) else 0
    attention = context * (2 * layer_kv_bytes + mask_bytes)
    if config.attention_softcap is not None:
        scores = min(tokens * context * config.group_size, PIECE_SCORES)
        attention += 2 * torch.float32.itemsize * scores
    logits = limits.max_batch_requests * config.vocab_size
    sampling = MOST_COPIES * min(logits, max(PIECE_ELEMENTS, config.vocab_size)) * torch.float32.itemsize
    requests = limits.max_batch_requests
    capacity = Capacity.of(tokens, requests, config.max_context_tokens, BLOCK_SIZE)
    head = logits * (dtype.itemsize + torch.float32.itemsize) + sampling
    return attention + head + device_bytes(config, dtype, capacity, MANY_PROGRAMS)


def _needs_masks(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if prompt attention in some layer needs a mask."""
    if config.attention_softcap is not None or not torch.cuda.is_available():
        return True
    level = fallbacks.level("prompt_attention")
    return any(
        kernel_on(device, dtype, config.head_dim, is_windowed, level)
        in (PrefillKernel.SDPA, PrefillKernel.MATH)
        for is_windowed in {window is not None for window in config.layer_windows}
    )


def host_buffer_bytes(config: ModelConfig, limits: SchedulerLimits, dtype: torch.dtype) -> int:
    """Return the bytes of the offload buffers: q, k, v and output of two sub-batches."""
    return 2 * limits.max_batch_tokens * 2 * config.qkv_rows * dtype.itemsize


def _device_bytes(
    activations: int,
    free: int,
    seen: int | None,
    cap: int | None,
    weights: int,
) -> int:
    # The longest contexts are only estimated: to measure them would take as much KV.
    activations = max(activations, seen or 0)
    needed = activations + (DEVICE_RESERVE_BYTES if seen is None else DEVICE_MARGIN_BYTES)
    if free < needed:
        raise MemoryError(
            f"with the weights loaded, {free / 1e9:.2f} GB of GPU memory are free, but an iteration needs "
            f"{needed / 1e9:.2f} GB beside KV{_other_programs()}: close other programs, choose a "
            "smaller model or smaller iterations (max_batch_tokens)"
        )
    if cap is None:
        return free - needed
    # The cap includes the memory of CUDA and its libraries.
    under_cap = activations + DEVICE_RESERVE_BYTES
    if cap < weights + under_cap:
        raise MemoryError(
            f"GPU memory is capped at {cap / GIB:.2f} GiB, but the weights take {weights / GIB:.2f} GiB and "
            f"an iteration {under_cap / GIB:.2f} GiB beside KV: raise the cap above "
            f"{(weights + under_cap) / GIB:.2f} GiB or choose a smaller model"
        )
    return min(free - needed, cap - weights - under_cap)


def _host_bytes(available: int, cap: int | None) -> int:
    """Return the usable part of the available memory; with a cap it may exceed half."""
    if cap is None:
        return int(available * HOST_SHARE)
    return min(cap, int(available * MOST_HOST_SHARE))


def _other_programs() -> str:
    """Name other programs that use the GPU, for error messages."""
    processes = [process for gpu in find_gpus()[0] for process in gpu.other_processes]
    named = [f"{p.name} (process {p.pid})" for p in processes[:3]]
    return f" (other programs there: {', '.join(named)})" if named else ""
