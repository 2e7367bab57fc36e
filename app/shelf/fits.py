"""Whether a model fits into this computer's memory, and how many chats beside it: the engine's own rules."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from neo_desktop.app.shelf.speed import MachineFigures, Speed, predict, predict_by
from neo_desktop.engine.execute.weight_stream import streaming_bytes
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv_tier import MEASURED_TIERS
from neo_desktop.engine.loading import (
    CPU_CACHE_DTYPES,
    asked_dtype,
    choose_device,
    choose_dtype,
    kept_form,
)
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.parts import cache_tokens_of
from neo_desktop.engine.predict.offloaded_matmul import Rates
from neo_desktop.engine.predict.weight_plan import WeightPlan, layer_matrices
from neo_desktop.engine.profiling.budget import (
    FreeMemory,
    MemoryCaps,
    limits_of,
    pool_blocks,
    smaller_form,
)
from neo_desktop.engine.profiling.profile_cache import find_tables
from neo_desktop.engine.profiling.weight_memory import plan_memory
from neo_desktop.engine.schedule.policies import get_policy
from neo_desktop.engine.simulation.analytic import bytes_read
from neo_desktop.engine.simulation.divided import DividedWeights, machine_rates
from neo_desktop.engine.simulation.presets import get_gpu, get_host
from neo_desktop.models.config import ModelConfig, ModelError
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.rank import ALONE, Rank
from neo_desktop.models.ranks import config_of_rank, form_of_rank
from neo_desktop.models.stored_form import StoredForm, forms_of, what_becomes

CHAT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Fit:
    """What loading a model would bring; nothing but `reason` where it does not fit."""

    reason: str | None  # why it does not fit; None: it does
    dtype: str  # of weights and KV
    weights_bytes: int  # of all
    host_weights_bytes: int  # of those beside a GPU that lie in host memory, since they do not fit it
    resident_shares: Mapping[str, float]  # "qkv" -> the share of its rows on the GPU; nothing: all are there
    weights_become: str  # what those of the files become: "float32", or what happens to quantised ones
    kv_bytes_per_1000_tokens: int
    gpu_tokens: int  # in the GPU-cache
    cpu_tokens: int  # in the CPU-cache
    chat_tokens: int  # of a chat as counted below: 4,096, or the model's context where that is shorter
    gpu_chats: int  # whose KV lies in the GPU-cache
    chats: int  # with those in the CPU-cache
    most_chats: int  # at once, however much memory there is
    is_imitated: bool  # there is no GPU: both caches lie in host memory
    speed: Speed | None
    speed_reason: str | None  # why there is none


def fit(
    config: ModelConfig,
    options: EngineOptions,
    free: FreeMemory,
    figures: MachineFigures | str,
    stored: WeightFormat = DENSE,
) -> Fit:
    """Reckon what the engine would take.

    Args:
        options: of the engine; which model they name does not matter.
        free: memory, with no model loaded.
        figures: of this computer, or why there are none.
        stored: the form of its matrices on a CPU where some are quantised.
    """
    device, rank = choose_device(options.device), Rank(0, options.tensor_parallel)
    whole_bytes = partial(
        config.weight_bytes, form=kept_form(stored, options, device, config, free.gpu_bytes)
    )
    reason = None
    try:
        part = config_of_rank(config, rank)
    except ModelError as error:
        reason, part, rank = str(error), config, ALONE
    # From here on a rank's: each takes as much, of a GPU of its own and of its share of the host's memory.
    config, stored = part, form_of_rank(stored, config, rank)
    free = replace(free, host_bytes=free.host_bytes // rank.count)
    form = kept_form(stored, options, device, config, free.gpu_bytes)
    dtype = choose_dtype(asked_dtype(options), config, device, free.host_bytes, form)
    weights = config.weight_bytes(dtype, form)
    rates = _rates(figures)
    tiers, most_chats = get_policy(options.policy).tiers, options.most_requests
    plan, blocks = None, dict.fromkeys(MEASURED_TIERS, 0)
    try:
        plan = plan_memory(config, form, dtype, device, options, lambda: rates, free)
        blocks |= pool_blocks(
            config,
            dtype,
            limits_of(options, device),
            device,
            cache_tokens_of(options),
            MemoryCaps.of(options),
            CPU_CACHE_DTYPES[options.cpu_cache_dtype],
            _beside_weights(free, weights, plan, streaming_bytes(layer_matrices(config, form, dtype))),
            weights if plan is None else plan.gpu_bytes,
            tiers,
            rates.bus_bytes_per_s / rates.gpu_bytes_per_s,
        )
    except MemoryError as error:
        reason = reason or str(error)
    tokens = {tier: BLOCK_SIZE * blocks[tier] if tier in tiers else 0 for tier in MEASURED_TIERS}
    chat_tokens = min(CHAT_TOKENS, config.max_context_tokens)
    chats = {tier: min(count // chat_tokens, most_chats) for tier, count in tokens.items()}
    if reason is None and not any(tokens.values()):
        room = free.host_bytes if free.gpu_bytes is None else free.gpu_bytes
        smaller = smaller_form(config, dtype, device, room, weights)
        reason = f"the weights fit, but no memory is left for chats: {smaller}close other programs"
    speed: Speed | str = "it does not fit"
    if rank.count > 1:
        speed = "that of divided models is not predicted"
    elif reason is None:
        in_host_memory = plan.host_bytes / (plan.gpu_bytes + plan.host_bytes) if plan else 0.0
        tables = find_tables(config, dtype, device, forms_of(form, config), in_host_memory)
        has_room = tuple(chats.items())
        if not any(chats.values()):
            speed = f"only {max(tokens.values()):,} tokens of context have room"
        elif tables is not None:
            speed = predict_by(tables, has_room, chat_tokens)
        elif isinstance(figures, str):
            speed = figures
        else:
            read = bytes_read(config, dtype, form)
            divided = DividedWeights.of(plan, rates, config, form, dtype) if figures.has_gpu else None
            speed = predict(figures, config, dtype, has_room, chat_tokens, read, divided)
    dtype_name = str(dtype).removeprefix("torch.")
    is_quantised = isinstance(stored, StoredForm) and bool(stored.stored)
    by_label = {tier.label: (tokens[tier], chats[tier]) for tier in MEASURED_TIERS}
    return Fit(
        reason=reason,
        dtype=dtype_name,
        weights_bytes=whole_bytes(dtype),
        host_weights_bytes=0 if plan is None else plan.host_bytes,
        resident_shares={} if plan is None else _resident_shares(config, plan),
        weights_become=what_becomes(form, dtype) if is_quantised else dtype_name,
        kv_bytes_per_1000_tokens=1000 * rank.count * config.kv_bytes_per_token(dtype),
        gpu_tokens=by_label["gpu"][0],
        cpu_tokens=by_label["cpu"][0],
        chat_tokens=chat_tokens,
        gpu_chats=by_label["gpu"][1],
        chats=min(sum(chats.values()), most_chats),
        most_chats=most_chats,
        is_imitated=device.type != "cuda",
        speed=None if isinstance(speed, str) else speed,
        speed_reason=speed if isinstance(speed, str) else None,
    )


def _beside_weights(free: FreeMemory, weights: int, plan: WeightPlan | None, streaming: int) -> FreeMemory:
    if free.gpu_bytes is None:
        return FreeMemory(free.host_bytes - weights, None)
    if plan is None:
        return FreeMemory(free.host_bytes, free.gpu_bytes - weights)
    on_gpu = plan.gpu_bytes + streaming
    return FreeMemory(free.host_bytes - plan.host_bytes, free.gpu_bytes - on_gpu)


def _rates(figures: MachineFigures | str) -> Rates:
    """How fast products are; where nothing is known, as on a usual desktop: plans depend on it little."""
    if isinstance(figures, str):
        gpu = get_gpu("rtx-3060")
        return machine_rates(gpu, get_host(gpu.host))
    return machine_rates(figures.gpu, figures.host)


def _resident_shares(config: ModelConfig, plan: WeightPlan) -> dict[str, float]:
    """Return the mean over all layers."""
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, matrix in config.each_matrix():
        if name in plan.resident_rows:
            of_kind = rows[".".join(part for part in name.split(".") if not part.isdigit())]
            of_kind[0] += plan.resident_rows[name]
            of_kind[1] += matrix.rows
    return {kind: resident / count for kind, (resident, count) in rows.items()}
