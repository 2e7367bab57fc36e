"""Set-up: an engine's parts, which measurements use as well: model, limits, memory, workers, executor."""

import logging
import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path

import torch

from neo_desktop import __version__, native
from neo_desktop.engine.cache_files import Key, cache_folder, digest
from neo_desktop.engine.cuda.streams import own_stream
from neo_desktop.engine.execute.build import build_executor
from neo_desktop.engine.execute.executor import Executor
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.execute.ranks.driver import Driver, DriverExecutor
from neo_desktop.engine.execute.ranks.group import Group
from neo_desktop.engine.execute.ranks.members import Member
from neo_desktop.engine.execute.recurrent import allocate_states
from neo_desktop.engine.execute.timeline import Timeline
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv.disk import BlockStore
from neo_desktop.engine.kv.disk_cache import DiskCache
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.kv.streamed import make_pool
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.loading import LoadedModel, choose_device, load, open_model
from neo_desktop.engine.mtp import drafting_of
from neo_desktop.engine.options import GIB, EngineOptions
from neo_desktop.engine.predict.corrected import CorrectedCostModel
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.predict.estimate import prompt_ms
from neo_desktop.engine.profiling.budget import FreeMemory, KVBudget, cache_tokens_of, limits_of
from neo_desktop.engine.profiling.profile_cache import load_or_profile
from neo_desktop.engine.profiling.rates import measured_bus_share
from neo_desktop.engine.profiling.warm_up import Gauge, warm_up
from neo_desktop.engine.profiling.workers import measured_workers
from neo_desktop.engine.progress import Progress
from neo_desktop.engine.remote.cluster import Cluster, check_ray
from neo_desktop.engine.remote.link import Address, Trust
from neo_desktop.engine.remote.shape import AttentionShape
from neo_desktop.engine.remote.trust import read_secret
from neo_desktop.engine.remote.workers import Workers
from neo_desktop.engine.schedule.policies import Policy, get_policy
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.speculate.drafter import ModelDrafter
from neo_desktop.models.rank import ALONE, Rank
from neo_desktop.models.ranks import config_of_rank
from neo_desktop.models.shapes import shape as published_shape

logger = logging.getLogger(__name__)

MEASURING = "Measuring this computer: "  # prefix of the profiler's progress
MOST_DISK_BYTES, MOST_DISK_SHARE = 10 * GIB, 0.1  # by default; the share is of the free space


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A loaded model and the memory for its KV."""

    model: LoadedModel
    limits: SchedulerLimits
    num_blocks: dict[KVTier, int]  # of the requested tiers, and of workers
    storage: KVStorage
    speculate: str = "auto"  # see `EngineOptions`
    drafter: ModelDrafter | None = None  # None: no draft model, and no layer of multi-token prediction
    leader: Driver | None = None  # of the other ranks; None: a single rank
    workers: Workers | None = None  # attention workers; None: no workers
    resources: ExitStack = field(default_factory=ExitStack)  # closes workers and other ranks

    def tokens_in(self, host_memory: bool) -> int:
        """Return the KV token capacity of the tiers in host memory, or of the other tiers."""
        blocks = (count for tier, count in self.num_blocks.items() if tier.in_host_memory is host_memory)
        return BLOCK_SIZE * sum(blocks)


def set_up(options: EngineOptions, progress: Progress | None = None) -> EngineParts:
    """Load a model and allocate KV memory for the policy's tiers.

    Raises:
        ValueError, RuntimeError, MemoryError: see `Engine.from_pretrained`.
    """
    tiers = get_policy(options.policy).tiers
    if options.cpu_cache_dtype != "auto" and not any(tier.host_attends for tier in tiers):
        raise ValueError(f"cpu_cache_dtype is {options.cpu_cache_dtype}, but this policy has no CPU-cache")
    for tier, tokens in cache_tokens_of(options).items():
        if tokens and tier not in tiers:
            logger.warning("policy %s has no %s: its size has no effect", options.policy, tier.title)
    trust = trust_of(options)  # report errors before loading
    with ExitStack() as resources:
        leader = None
        checkpoint = None if options.shape is not None else open_model(options.model, options.mmproj)
        if options.tensor_parallel > 1:
            config = published_shape(options.shape or "") if checkpoint is None else checkpoint.config()
            config_of_rank(config, Rank(0, options.tensor_parallel))  # before any process starts
            leader = Driver(options, choose_device(options.device))
            resources.callback(leader.close)
        drafting = drafting_of(options, checkpoint)
        if drafting is not None:
            resources.callback(drafting.close)
        plan = None if drafting is None else drafting.plan
        rank = ALONE if leader is None else leader.rank
        loaded = load(options, progress, plan=plan, rank=rank, checkpoint=checkpoint)
        drafter = None if drafting is None else drafting.attach(loaded)
        options = options if drafting is None else drafting.options
        held = 0
        if drafter is not None and drafter.kept is not None:
            held = drafter.kept.most_bytes(loaded.config.hidden_size)
        parts = replace(take_memory(loaded, options, member=leader, held=held), drafter=drafter)
        if trust is not None:
            parts = with_workers(parts, options, trust, resources)
        return replace(parts, leader=leader, resources=resources.pop_all())


def cost_model_of(
    parts: EngineParts, policy: Policy, tables: TableCostModel | None, progress: Progress | None = None
) -> CorrectedCostModel | None:
    """Return the cost model of an engine; None: the policy does not need it.

    Without `tables`, they are measured on this computer if needed.
    """
    decoder, storage = parts.model.decoder, parts.storage
    # A single tier needs no predictions, but offloaded weights are divided by the cost model.
    has_choice = sum(map(bool, parts.num_blocks.values())) > 1 or parts.workers is not None
    if tables is None and ((policy.needs_predictions and has_choice) or decoder.has_splits):
        tables = load_or_profile(decoder, storage, parts.limits, progress, streams=parts.model.streams)
    if tables is None:
        return None
    if parts.workers is not None:
        attention, networks = measured_workers(storage, decoder)
        tables = replace(tables, attention={**tables.attention, **attention}, networks=networks)
    return CorrectedCostModel.of(tables)


def executor_of(parts: EngineParts, timeline: Timeline | None) -> Executor:
    """Build the executor of an engine's plans, on all ranks."""
    leader = parts.leader
    if leader is None:
        return runner_of(parts, timeline)
    own = runner_of(parts, timeline, leader.group)
    leader.exchange(True, all)  # wait until they are ready for plans
    return DriverExecutor(own, leader)


def runner_of(parts: EngineParts, timeline: Timeline | None, group: Group | None = None) -> ModelRunner:
    """Build the model runner of this rank."""
    limits, model = parts.limits, parts.model
    sizes = limits.max_batch_tokens, limits.max_batch_requests
    given = model.decoder, parts.storage, *sizes, timeline, model.streams, group
    return build_executor(*given, moves_experts=True)


def trust_of(options: EngineOptions) -> Trust | None:
    """Return the workers' credentials; None: no workers.

    Raises:
        ValueError: an address or the secret cannot be used, or Ray is missing.
    """
    if options.workers is None:
        return None
    if options.workers.isdigit():
        check_ray()
    else:
        addresses_of(options.workers)
    return Trust(read_secret(options.worker_secret), options.worker_timeout_s)


def addresses_of(named: str) -> list[Address]:
    """Parse the workers' addresses; raise ValueError for an invalid one."""
    return [Address.parse(text.strip()) for text in named.split(",")]


def with_workers(
    parts: EngineParts, options: EngineOptions, trust: Trust, resources: ExitStack
) -> EngineParts:
    """Connect an engine's parts to workers; retry unreachable ones in the background.

    Raises:
        ConnectionError: a worker refuses.
        RuntimeError: Ray does not start.
    """
    named = options.workers or ""
    decoder, config = parts.model.decoder, parts.model.config
    most = parts.limits.max_batch_requests * config.max_context_tokens // BLOCK_SIZE
    shape = AttentionShape.of(config, BLOCK_SIZE, decoder.dtype)
    sinks = None if decoder.sinks is None else torch.stack([each.float().cpu() for each in decoder.sinks])
    if named.isdigit():
        cluster = Cluster(int(named), trust.secret)
        resources.callback(cluster.close)
        addresses: Sequence[Callable[[], Address]] = cluster.addresses
    else:
        addresses = [repeat(address).__next__ for address in addresses_of(named)]  # they never change
    workers = Workers(addresses, trust, config, shape, sinks, most)
    resources.callback(workers.close)
    workers.connect()
    pools = {tier: parts.storage[tier] for tier in parts.storage.tiers}
    return replace(
        parts,
        num_blocks=parts.num_blocks | workers.num_blocks,
        storage=KVStorage(pools | workers.pools, parts.storage.states),
        workers=workers,
    )


def take_memory(
    loaded: LoadedModel,
    options: EngineOptions,
    tiers: Sequence[KVTier] | None = None,
    member: Member | None = None,
    held: int = 0,
) -> EngineParts:
    """Allocate KV memory for a loaded model; repeated calls allocate separate memory.

    On a GPU the largest iterations run first, and the remaining free memory is divided.

    Args:
        tiers: None: the policy's.
        member: of the ranks that divide the model; None: a single rank.
        held: bytes of host memory that are taken later, and not for KV.

    Raises:
        MemoryError: the memory does not suffice.
    """
    tiers = get_policy(options.policy).tiers if tiers is None else tiers
    decoder = loaded.decoder
    num_ranks = 1 if member is None else member.rank.count
    if member is None and any(tier.host_attends for tier in tiers):
        bind_threads()
    limits = limits_of(options, decoder.device)
    iteration_bytes, bus_share = None, None
    if decoder.device.type == "cuda":
        native.set_default_num_threads(max(native.num_threads_beside_gpu() // num_ranks, 1))
        if any(tier.is_streamed for tier in tiers):
            bus_share = measured_bus_share(decoder.device)
        iteration_bytes = warm_up(decoder, tiers, limits, loaded.streams, Gauge(decoder.device))
        logger.debug("iterations take up to %d MiB of GPU memory beside KV", iteration_bytes >> 20)
    if member is not None:
        member.join(decoder.dtype, decoder.device)
    free = FreeMemory.now(decoder.device, iteration_bytes, num_ranks)
    free = replace(free, host_bytes=free.host_bytes - held)
    weight_bytes = decoder.memory()[decoder.device]
    budget = KVBudget(
        loaded.config,
        decoder.dtype,
        decoder.device,
        options,
        free,
        weight_bytes,
        tiers,
        bus_share,
        has_host_weights=decoder.has_splits,
        planned_tokens=None if loaded.placed is None else loaded.placed.device_tokens,
    )
    num_blocks = budget.num_blocks()
    if member is not None:
        num_blocks = member.agreed(num_blocks)
    if not any(num_blocks.values()) and options.workers is None:
        raise MemoryError(
            f"no room for KV: it needs at least {BLOCK_SIZE} tokens of "
            f"{' or '.join(tier.title for tier in tiers)}"
        )
    with loaded.streams.on_device():  # memory belongs to the stream on which it was allocated
        pools = {
            tier: make_pool(tier, loaded.config, count, budget.dtype_of(tier), decoder.device, decoder.sinks)
            for tier, count in num_blocks.items()
            if count or not tier.is_streamed
        }
        states = allocate_states(loaded.config, budget.num_states, decoder.device)
    return EngineParts(loaded, limits, num_blocks, KVStorage(pools, states), options.speculate)


def bind_threads() -> None:
    """Bind the threads of CPU attention to cores, if fallback level and system allow it."""
    wanted = fallbacks.level("affinity") == "bound"
    if not native.bind_threads(wanted) and wanted:
        fallbacks.limit("affinity", "free", "the system refuses to bind threads to cores")


def disk_folder(options: EngineOptions) -> tuple[Path, int] | None:
    """Return the folder for KV that leaves the caches, and its limit in bytes; None: that KV is lost."""
    path = cache_folder("kv")
    if options.disk_cache_gib is not None:
        num_bytes = int(options.disk_cache_gib * GIB)
    else:
        there = next(each for each in (path, *path.parents) if each.exists())
        num_bytes = min(MOST_DISK_BYTES, int(shutil.disk_usage(there).free * MOST_DISK_SHARE))
    return (path, num_bytes) if num_bytes else None


def disk_cache_of(
    parts: EngineParts, kv_cache: KVCache, cost: TableCostModel | None, folder: tuple[Path, int]
) -> DiskCache | None:
    """Return the KV cache on disk; None: no other start could use the KV. Workers and ranks do not use it."""
    model, storage = parts.model, parts.storage
    if model.identity is None or parts.leader is not None:
        return None
    key = key_of(model)
    kinds: dict[KVTier | None, str] = {
        tier: str(storage[tier].dtype)
        for tier, count in parts.num_blocks.items()
        if count and not tier.is_remote
    }
    groups = {
        tier: bytes.fromhex(digest({**key, "kv": kind})) for tier, kind in (kinds | {None: "states"}).items()
    }
    try:
        store = BlockStore(*folder)
    except OSError as error:
        logger.warning("KV is not saved to disk: %s", error)
        return None

    def compute_ms(begin: int, end: int) -> float:
        return math.inf if cost is None else prompt_ms(cost, begin, end, parts.limits.max_batch_tokens)

    return DiskCache(store, kv_cache, storage, groups, compute_ms, own_stream(model.streams))


def key_of(model: LoadedModel) -> Key:
    """Return all on which the KV of a model depends."""
    decoder = model.decoder
    return {
        "neo_desktop": __version__,
        "model": model.identity,
        "device": decoder.device.type,
        "isa": native.default_isa(),
        "dtype": str(decoder.dtype),
        "linear": sorted({linear.form for linear in decoder.linears()}),
        "quantised": fallbacks.level("quantised") if decoder.device.type == "cuda" else None,  # its rounding
        "block_size": BLOCK_SIZE,
        "kv_parts": decoder.config.kv_parts,
    }
