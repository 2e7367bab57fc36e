"""A cost model and KV budgets from a machine's datasheet: a roofline with the presets' shares."""

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

import torch

from neo_desktop.engine.execute.weight_stream import streaming_bytes
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv.states import SLOTS_PER_REQUEST
from neo_desktop.engine.kv_tier import ALL_TIERS, MEASURED_TIERS, KVTier
from neo_desktop.engine.predict.cost_model import (
    NOTHING,
    Curve,
    MemoryShares,
    Surface,
    TableCostModel,
)
from neo_desktop.engine.predict.estimate import BatchShape, Decodes
from neo_desktop.engine.predict.weight_plan import WeightPlan, layer_matrices
from neo_desktop.engine.profiling.budget import (
    DEVICE_RESERVE_BYTES,
    HOST_SHARE,
    activation_bytes,
    num_slots,
)
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.schedule.streamed import hides
from neo_desktop.engine.simulation.divided import CPU_CALL_MS, OFFLOAD_MS, DividedWeights
from neo_desktop.engine.simulation.presets import GpuPreset, HostPreset
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.linear.protocol import WeightFormat

# Software overheads. Measured on an H200: a CUDA graph starts about one kernel every 2 µs; a round trip
# GPU -> CPU -> GPU by stream memory operations takes 22 µs, a small copy over the bus 10.7 µs.
KERNEL_MS = 0.002
BUS_LATENCY_MS = 0.0107
# Scheduling, graph launch and reading sampled tokens: an H100's iterations of 1, 8 and 32 requests took 0.37,
# 0.53 and 0.86 ms beside the device's work (docs/performance.md). Its host, a virtual machine, launched
# slowly; a desktop's core is no slower. llama.cpp's token takes 0.28 ms on consumer PCs (`shares`).
ITERATION_MS = 0.37
REQUEST_MS = 0.016
HEAD_KERNELS = 12
SAMPLING_PASSES = 6  # over the float32 logits

LONGEST_CHUNK = 1 << 16  # tokens; last point of the tables of linear stages and prompt chunks
LONGEST_CONTEXT = 1 << 17
RESIDENT_LAYERS = 3  # layers of the prefetch buffer: one in use, one arriving, one leaving
CHUNK_STEP = 1.1  # ratio of consecutive points of prompt chunks: a chord is within 0.5 % of the parabola


@dataclass(frozen=True, slots=True)
class KVBudget:
    """KV capacity of the tiers, in tokens."""

    gpu_tokens: int
    cpu_tokens: int
    streamed_tokens: int = 0
    num_states: int | None = None  # slots for recurrent states; None: the model has no recurrent layers

    @property
    def most_requests(self) -> float:
        """The number of requests whose recurrent states have slots."""
        return math.inf if self.num_states is None else self.num_states // SLOTS_PER_REQUEST

    def num_blocks(self, workers: KVTier | None = None) -> dict[KVTier, int]:
        """Return `tier -> blocks`.

        Args:
            workers: tier of the workers that hold the CPU-cache; None: this computer holds it.
        """

        def tokens(tier: KVTier) -> int:
            if tier.is_streamed:
                return self.streamed_tokens
            return self.cpu_tokens if tier.in_host_memory else self.gpu_tokens

        blocks = {tier: tokens(tier) // BLOCK_SIZE for tier in ALL_TIERS}
        if workers is None:
            return blocks
        return {workers if tier.cpu_attends else tier: count for tier, count in blocks.items()}

    def swapping(self, cost: TableCostModel, limits: SchedulerLimits) -> "KVBudget":
        """Return a budget with streamed KV in host memory, as much as an iteration hides at most.

        The prefetch buffer for it takes GPU memory.
        """
        (streamed,) = (tier for tier in ALL_TIERS if tier.is_streamed)

        def divided(num_blocks: int) -> KVBudget:
            tokens = num_blocks * BLOCK_SIZE
            resident = -(-tokens * RESIDENT_LAYERS // cost.num_layers)
            near = (self.gpu_tokens - resident) // BLOCK_SIZE * BLOCK_SIZE
            return replace(self, gpu_tokens=near, cpu_tokens=self.cpu_tokens - tokens, streamed_tokens=tokens)

        def is_too_much(num_blocks: int) -> bool:
            budget = divided(num_blocks)
            if 2 * budget.gpu_tokens < self.gpu_tokens:
                return True
            decodes = {
                streamed.as_attended: Decodes(limits.max_batch_requests, budget.gpu_tokens),
                streamed: Decodes(1, budget.streamed_tokens),
            }
            return not hides(cost, BatchShape().plus(decodes))

        counts = range(1, self.cpu_tokens // BLOCK_SIZE + 1)
        return divided(bisect_left(counts, True, key=is_too_much))


def kv_budget(
    gpu: GpuPreset,
    host: HostPreset,
    config: ModelConfig,
    dtype: torch.dtype,
    limits: SchedulerLimits,
    form: WeightFormat = DENSE,
    plan: WeightPlan | None = None,
) -> KVBudget:
    """Return the KV budget beside weights in this format, activations, the reserve, and the host's share.

    Args:
        plan: placement of weights partly in host memory; None: all are on the GPU.

    Raises:
        MemoryError: the weights do not fit, or no memory is left for KV.
    """
    weights = config.weight_bytes(dtype, form)
    if plan is not None:
        weights = plan.gpu_bytes + streaming_bytes(layer_matrices(config, form, dtype))
    rest = gpu.memory_bytes - weights - DEVICE_RESERVE_BYTES - activation_bytes(config, limits, dtype)
    token_bytes = config.kv_bytes_per_token(dtype)
    slots = num_slots(config, limits, rest, token_bytes, None if plan is None else plan.device_tokens)
    rest -= slots * config.state_bytes
    tokens = rest // token_bytes
    if tokens < BLOCK_SIZE:
        raise MemoryError(
            f"the model's weights take {weights / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')}, and "
            f"the {gpu.title} has {gpu.memory_bytes / 1e9:.1f} GB, of which "
            f"{(gpu.memory_bytes - weights - rest) / 1e9:.1f} GB are needed for activations and the driver: "
            "choose a smaller model or a larger GPU"
        )
    host_bytes = host.memory_bytes - (0 if plan is None else plan.host_bytes)
    host_bytes -= config.table_bytes(dtype, form)
    host_tokens = int(host_bytes * HOST_SHARE) // token_bytes
    return KVBudget(
        tokens // BLOCK_SIZE * BLOCK_SIZE,
        host_tokens // BLOCK_SIZE * BLOCK_SIZE,
        num_states=slots or None,
    )


def bytes_read(config: ModelConfig, dtype: torch.dtype, form: WeightFormat) -> tuple[float, float]:
    """Return the weight bytes that a layer and the head read, with matrices in this format."""
    vocab, hidden = config.vocab_size, config.hidden_size
    head = form.named("embedding" if config.tie_word_embeddings else "head").nbytes(vocab, hidden, dtype)
    tables = (matrix for matrix in config.all_matrices if matrix.is_table and form.tables is None)
    unread = sum(form.named(each.name).nbytes(each.rows, each.columns, dtype) for each in tables)
    layers = config.weight_bytes(dtype, form) - unread - head - hidden * dtype.itemsize  # the last norm
    return layers / config.num_layers, head


def host_attention_ms(host: HostPreset, config: ModelConfig, dtype: torch.dtype) -> float:
    """Return the time of decode attention on a host for one token of context, in one layer."""
    kv_bytes = config.kv_bytes_per_token(dtype) / config.num_layers
    return (kv_bytes / host.attention_bytes_per_s + _attention_flops(config) / host.attention_flops) * 1e3


def _attention_flops(config: ModelConfig) -> int:
    """Return FLOP per context token: q·k and p·v, two multiply-adds per element of a query head."""
    return 4 * config.num_heads * config.head_dim


def analytic_cost_model(
    gpu: GpuPreset,
    host: HostPreset,
    config: ModelConfig,
    dtype: torch.dtype,
    read: tuple[float, float] | None = None,
    divided: DividedWeights | None = None,
) -> TableCostModel:
    """Build the tables that a profiler would measure on an ideal machine with these figures.

    `read` is the result of `bytes_read`; None: all weights have `dtype`. `divided` describes weights partly
    in host memory, or experts, which are not all read; None: neither exists.

    Linear stages take the longer of reading weights and arithmetic. Decode attention is bound by reading KV,
    on the CPU also by arithmetic, once per query head of a group. A decode also reads and writes its
    recurrent states on the GPU.
    """
    kv_bytes = config.kv_bytes_per_token(dtype) / config.num_layers  # of one layer, per token
    embeddings = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size
    layer_parameters = (config.num_parameters - embeddings - config.hidden_size) / config.num_layers
    head_parameters = config.vocab_size * config.hidden_size
    layer_bytes, head_bytes = read or (layer_parameters * dtype.itemsize, head_parameters * dtype.itemsize)
    streaming = gpu.memory_bytes_per_s * gpu.streaming_share
    matmul = gpu.tensor_flops * gpu.matmul_share
    # The bus reads host memory.
    bus = min(gpu.bus_bytes_per_s * gpu.bus_share, host.memory_bytes_per_s * host.read_share)

    def roofline(
        parameters: float, nbytes: float, most_rows: int, fixed_ms: float, row_ms: float = 0.0
    ) -> Curve:
        """Return the maximum of two straight lines; their corner is a point of the curve."""

        def product_ms(rows: float) -> float:
            return max(nbytes / streaming, 2 * parameters * rows / matmul) * 1e3

        corner = matmul * nbytes / (2 * streaming * parameters)
        rows = sorted({1.0, corner, 2 * corner, float(max(most_rows, int(4 * corner)))})
        return Curve(rows, [fixed_ms + row_ms * n + product_ms(n) for n in rows])

    def attention(fixed_ms: float, ms_per_token: float) -> Surface:
        """Return a surface for times proportional to requests x mean context; bilinear is exact."""
        requests, contexts = (1, 1024), (1, LONGEST_CONTEXT)
        times = [[fixed_ms + n * (states_ms + c * ms_per_token) for c in contexts] for n in requests]
        return Surface(requests, contexts, times)

    def chunk_ms(tokens: float, context: float) -> float:
        """Return the time of a prompt chunk's attention without masked pairs; `Surface` includes x > y."""
        visible = max(context - tokens / 2, 0.0)
        return 2 * KERNEL_MS + tokens * visible * chunk_token_ms

    attention_flops = _attention_flops(config)
    query_bytes = config.num_heads * config.head_dim * dtype.itemsize
    logits_ms = SAMPLING_PASSES * config.vocab_size * 4 / streaming * 1e3
    chunk_token_ms = attention_flops / (gpu.tensor_flops * gpu.prefill_attention_share) * 1e3
    steps = range(int(math.log(LONGEST_CHUNK, CHUNK_STEP)) + 1)
    chunks = sorted({round(CHUNK_STEP**step) for step in steps} | {LONGEST_CHUNK})
    contexts = (*chunks, LONGEST_CONTEXT)
    offload_bytes = 2 * query_bytes + kv_bytes  # q, k and v there, the output back
    most = LONGEST_CHUNK
    device_token_ms = kv_bytes / (gpu.memory_bytes_per_s * gpu.attention_share) * 1e3
    host_token_ms = host_attention_ms(host, config, dtype)
    states_ms = 2 * config.state_bytes / config.num_layers / streaming * 1e3
    on_device, on_host = attention(2 * KERNEL_MS, device_token_ms), attention(CPU_CALL_MS, host_token_ms)
    mixtures = 0 if config.experts is None else len(config.experts.layers)
    recurrent = sum(len(shape) == 3 for shape in config.state_shapes)
    kernels_ms = gpu.layer_ms * config.num_layers_in_all + gpu.mixture_ms * mixtures
    kernels_ms = (kernels_ms + gpu.recurrent_ms * recurrent) / config.num_layers
    if divided is None:
        linear, host_linear = roofline(layer_parameters, layer_bytes, LONGEST_CHUNK, kernels_ms), NOTHING
    else:
        linear, host_linear = divided.curves(config.num_layers, kernels_ms, LONGEST_CHUNK)
    # Contiguous K and V of a layer, for pages as well as streamed KV.
    transfer = Curve((1, most), [BUS_LATENCY_MS + n * kv_bytes / bus * 1e3 for n in (1, most)])
    memory = host.memory_bytes_per_s * host.read_share
    return TableCostModel(
        num_layers=config.num_layers,
        overlaps=True,
        iteration_ms=ITERATION_MS,
        linear=linear,
        host_linear=host_linear,
        head=roofline(head_parameters, head_bytes, 1024, HEAD_KERNELS * KERNEL_MS, logits_ms + REQUEST_MS),
        offload=Curve((1, 1024), [OFFLOAD_MS + n * offload_bytes / bus * 1e3 for n in (1, 1024)]),
        transfer=transfer,
        swap=transfer,
        memory_shares=MemoryShares(bus / memory, kv_bytes / (host_token_ms / 1e3) / memory),
        first_chunk_attention=Curve(chunks, [chunk_ms(n, n) for n in chunks]),
        later_chunk_attention=Surface(
            chunks, contexts, [[chunk_ms(tokens, context) for context in contexts] for tokens in chunks]
        ),
        attention={tier: on_host if tier.host_attends else on_device for tier in MEASURED_TIERS},
    )
