"""Measured cost tables on disk, under a key that names everything they depend on.

One JSON file per key, `<hash of the key>.json`, contains the key and the tables. Reading compares the whole
key: another GPU, driver, CPU, model or version never gets these tables.
"""

import json
import logging
import time
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch

from neo_desktop import __version__, native
from neo_desktop.engine.cache_files import Key, cache_folder, digest, write_json
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.kv_tier import MEASURED_TIERS
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.profiling import hardware
from neo_desktop.engine.profiling.profiler import profile
from neo_desktop.engine.profiling.synthetic import measured_blocks
from neo_desktop.engine.progress import Progress
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import Decoder

logger = logging.getLogger(__name__)

SHARE_DIGITS = 1  # of weight shares: a tenth changes little
SHAPE = (  # the numbers of a `ModelConfig` that decide how long its stages take
    *("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("vocab_size", "max_context_tokens", "qkv_bias", "output_bias", "mlp_bias", "qk_norm"),
    *("attention_sinks", "attention_softcap", "kv_parts"),
)
PROFILER_VERSION = 15  # raise it when the measurements or their method change


def load_or_profile(
    decoder: Decoder,
    storage: KVStorage,
    limits: SchedulerLimits,
    progress: Progress | None = None,
    *,
    streams: Streams | None = None,
    refresh: bool = False,
) -> TableCostModel:
    """Return the tables of an earlier start on this computer, or measure and save them now.

    File errors are logged, not raised.

    Args:
        storage: the KV pools, before the first request: the measurements overwrite them.
        limits: bounds of the measured sizes.
        streams: None: the whole device.
        refresh: measure in any case.
    """
    streams = streams or Streams(decoder.device)
    key = profile_key(decoder, storage, limits, streams)
    path = profile_path(key)
    tables = None if refresh else read_profile(path, key)
    if tables is None:
        started = time.perf_counter()
        with streams.on_device():
            tables = profile(decoder, storage, limits, progress=progress, streams=streams)
        logger.debug("measured this computer in %.1f s", time.perf_counter() - started)
        trouble = "the measurements of this computer cannot be saved, so the next start repeats them"
        write_json(path, {"key": key, "tables": tables.to_json()}, trouble)
    decoder.streamed_shares = tables.streamed_shares
    decoder.streamed_experts = tables.streamed_experts
    return tables


def profile_key(
    decoder: Decoder, storage: KVStorage, limits: SchedulerLimits, streams: Streams | None = None
) -> dict[str, Any]:
    """Return everything that the tables depend on, as plain JSON values; see `load_or_profile`."""
    config = decoder.config
    host = next((storage[tier] for tier in storage.tiers if tier.cpu_attends), None)
    return {
        **processors_key(decoder.device),
        "profiler": PROFILER_VERSION,
        "sms": (streams or Streams(decoder.device)).sms,
        "torch_threads": torch.get_num_threads(),
        "levels": dict(fallbacks.limits()),
        "cores": native.default_num_threads(),
        "isa": native.default_isa(),
        "device": decoder.device.type,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "linear": sorted({linear.form for linear in decoder.linears()}),
        "in_host_memory": _share_in_host_memory(decoder),
        "cpu_cache_dtype": str(host.dtype if host else decoder.dtype).removeprefix("torch."),
        "block_size": BLOCK_SIZE,
        "model": model_key(config),
        # The range of the tables. Pool sizes are rounded: free memory varies a little between starts.
        "max_batch_tokens": limits.max_batch_tokens,
        "max_batch_requests": limits.max_batch_requests,
        "blocks_log2": {
            tier.name: measured_blocks(decoder, storage, tier).bit_length() for tier in MEASURED_TIERS
        },
    }


def processors_key(device: torch.device) -> dict[str, Any]:
    """Return the processors, and the versions that drive them; nothing identifies the owner."""
    gpu = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "driver": hardware.driver_version(),
        }
    return {
        "neo_desktop": __version__,
        "torch": torch.__version__,
        "gpu": gpu,
        "cpu": hardware.cpu_name(),
    }


def _share_in_host_memory(decoder: Decoder) -> float:
    """Return the rounded share of a GPU model's weights in host memory."""
    if not decoder.has_splits:
        return 0.0
    memory = decoder.memory()
    return round(memory.get(torch.device("cpu"), 0) / sum(memory.values()), SHARE_DIGITS)


def model_key(config: ModelConfig) -> dict[str, Any]:
    """Return the shape of a model, without its name and folder."""
    experts = config.experts
    return {name: getattr(config, name) for name in SHAPE} | {
        "layer_windows": list(config.layer_windows),
        "experts": None if experts is None else [experts.count, experts.per_token, *experts.layers],
    }


def find_tables(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    linear: Set[str],
    in_host_memory: float = 0.0,
) -> TableCostModel | None:
    """Return the newest tables of this model on this computer, for any cache sizes.

    Args:
        linear: formats of the quantised matrices; other formats do not matter.
        in_host_memory: share of a GPU model's weights in host memory.
    """
    wanted = {
        "neo_desktop": __version__,
        "profiler": PROFILER_VERSION,
        "torch": torch.__version__,
        "cpu": hardware.cpu_name(),
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "in_host_memory": round(in_host_memory, SHARE_DIGITS),
        "model": model_key(config),
    }
    # Query the driver, not CUDA: a CUDA context would take GPU memory for good.
    gpus = {gpu.name for gpu in hardware.find_gpus()[0]} if device.type == "cuda" else {None}
    folder = cache_folder("profiles")
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            key = json.loads(path.read_text(encoding="utf-8"))["key"]
            quantised = {form for form in key["linear"] if set(form.split("+")) <= set(native.STORED_TYPES)}
            name = key["gpu"] and key["gpu"]["name"]
            if quantised == linear and name in gpus and all(key[each] == wanted[each] for each in wanted):
                return read_profile(path, key)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # another version, or an incomplete file
    return None


def profile_path(key: Key) -> Path:
    """Return the path for the tables of a key, which need not exist."""
    return cache_folder("profiles") / f"{digest(key)}.json"


def read_profile(path: Path, key: Key) -> TableCostModel | None:
    """Return the tables of a file; None if it does not exist, or, with a warning, if it is unusable."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["key"] != key:
            raise ValueError("it belongs to another configuration")
        return TableCostModel.from_json(data["tables"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s cannot be used, so this computer is measured again: %s", path, error)
        return None
