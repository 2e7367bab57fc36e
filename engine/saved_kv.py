"""KV on disk of an engine: its folder, its size and its keys."""

import logging
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from neo_desktop import __version__, native
from neo_desktop.engine.cache_files import Key, cache_folder, digest
from neo_desktop.engine.cuda.streams import own_stream
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv.disk import BlockStore
from neo_desktop.engine.kv.disk_cache import DiskCache
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.loading import LoadedModel
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.predict.estimate import prompt_ms
from neo_desktop.engine.setup import EngineParts

logger = logging.getLogger(__name__)

GIB = 1024**3
MOST_BYTES, MOST_SHARE = 10 * GIB, 0.1  # by default; the share is of the free space


@dataclass(frozen=True, slots=True)
class DiskFolder:
    """A folder for KV."""

    path: Path
    num_bytes: int  # limit


def disk_folder(options: EngineOptions) -> DiskFolder | None:
    """Return the folder for KV that leaves the caches; None: it is lost."""
    path = cache_folder("kv")
    if options.disk_cache_gib is not None:
        num_bytes = int(options.disk_cache_gib * GIB)
    else:
        there = next(each for each in (path, *path.parents) if each.exists())
        num_bytes = min(MOST_BYTES, int(shutil.disk_usage(there).free * MOST_SHARE))
    return DiskFolder(path, num_bytes) if num_bytes else None


def disk_cache_of(
    parts: EngineParts, kv_cache: KVCache, cost: TableCostModel | None, folder: DiskFolder
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
        store = BlockStore(folder.path, folder.num_bytes)
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
    }
