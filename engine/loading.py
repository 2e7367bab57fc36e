"""Loading: from a model's name to an engine's parts: device, dtype, weights, tokenizer, memory."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

import neo_desktop.models
from neo_desktop.engine.cuda.pinned import PageableError, check_weight_pages, mapped_bytes, weight_bytes
from neo_desktop.engine.cuda.presence import why_unusable
from neo_desktop.engine.cuda.streams import Streams, open_streams
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.kernels.toolchain import limit_kernels
from neo_desktop.engine.options import BUILTIN, EngineOptions
from neo_desktop.engine.predict.weight_plan import WeightPlan, host_form
from neo_desktop.engine.profiling.budget import (
    DEVICE_RESERVE_BYTES,
    MOST_HOST_SHARE,
    FreeMemory,
    activation_bytes,
    limits_of,
)
from neo_desktop.engine.profiling.hardware import host_memory
from neo_desktop.engine.profiling.rates import measured_rates
from neo_desktop.engine.profiling.weight_memory import plan_memory
from neo_desktop.engine.progress import Progress
from neo_desktop.engine.unused_memory import return_memory
from neo_desktop.models.checkpoint import Checkpoint, open_checkpoint
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.families import exceeds_float16
from neo_desktop.models.gguf.checkpoint import GGUFCheckpoint
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.linear.dense import DENSE, Dense
from neo_desktop.models.linear.offloaded import OffloadedFormat
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.missing import why_missing
from neo_desktop.models.rank import ALONE, Rank
from neo_desktop.models.ranks import config_of_rank, weights_of_rank
from neo_desktop.models.registry import check_model, load_model, random_model
from neo_desktop.models.shapes import shape as published_shape
from neo_desktop.models.stored_form import StoredForm, stored_form
from neo_desktop.models.tokenizer import ByteTokenizer, Tokenizer
from neo_desktop.models.traced.config import TracedConfig, with_long_factors
from neo_desktop.models.vision.tower import TEXT_ONLY, Vision, why_blind
from neo_desktop.models.weights import Weights

logger = logging.getLogger(__name__)

BUILTIN_NAME = "neo-desktop-guide"  # name in the API
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LOADING = "Loading weights"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run."""

    name: str
    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer
    streams: Streams  # of the decoder's device
    vision: Vision | None = None
    blindness: str = TEXT_ONLY  # the sentence that refuses images where `vision` is None
    identity: str | None = None  # of config and weights: equal after a restart, if nothing has changed
    placed: WeightPlan | None = None  # placement of the weights; None: all are on the compute device


# Plans the placement of weights with this config, format, dtype and device; None: all on the compute device.
Planner = Callable[[ModelConfig, WeightFormat, torch.dtype, torch.device], WeightPlan | None]


def load(
    options: EngineOptions,
    progress: Progress | None = None,
    *,
    plan: Planner | None = None,
    rank: Rank = ALONE,
    checkpoint: Checkpoint | None = None,
) -> LoadedModel:
    """Load a checkpoint, the built-in model, or random weights of a published shape.

    Args:
        plan: plans the placement of weights; None: use free memory and the options.
        rank: loads its part.
        checkpoint: the model's, already open; None: open it.

    Raises:
        ModelError: the checkpoint cannot be used, or not be divided.
        ValueError: the shape is unknown, or the device or dtype is unavailable.
        RuntimeError: the GPU cannot be partitioned.
        MemoryError: the weights do not fit.
    """
    progress = progress or (lambda share, what: None)
    progress(0.0, LOADING)
    return_memory()
    plan = plan or partial(_plan, options, rank)
    device = choose_device(options.device)
    streams = open_streams(device, options.gpu_slice)
    if options.weights_dtype == "exact":
        if device.type == "cpu":
            raise ValueError(
                "weights_dtype 'exact' needs a GPU: a CPU's kernels round inputs to 8 bits; choose float32"
            )
        fallbacks.limit("quantised", "exact", "weights_dtype 'exact' asks for it", is_told=True)
    if options.shape is not None:
        config = config_of_rank(published_shape(options.shape), rank)
        dtype = choose_dtype(options.dtype, config, device, host_memory().available_bytes // rank.count)
        with streams.on_device():
            form: WeightFormat = DENSE if device.type == "cpu" else gpu_form(DENSE)
            placed = plan(config, form, dtype, device)
            decoder = made(
                placed_form(form, placed, device), partial(random_model, config, dtype=dtype, device=device)
            )
        check_weight_pages()
        name = f"{options.shape} (random weights)"
        return LoadedModel(
            name, config, decoder, ByteTokenizer(), streams, identity=options.shape, placed=placed
        )

    started_s = time.perf_counter()
    checkpoint = checkpoint or open_model(options.model, options.mmproj)
    whole = checkpoint.config()
    if options.longrope == "long":
        whole = with_long_factors(whole)
    if whole.generation.ignored and rank.number == 0:
        ignored = ", ".join(whole.generation.ignored)
        logger.warning("%s: recommended, but not supported here: %s", checkpoint.name, ignored)
    weights = check_model(checkpoint, whole)  # before any decision depends on possibly wrong numbers
    config, weights = config_of_rank(whole, rank), weights_of_rank(weights, whole, rank)
    checkpoint.read_ahead()
    tokenizer = checkpoint.tokenizer()
    stored = stored_form(weights, config)
    form = kept_form(stored, options, device, config)
    dtype = choose_dtype(
        asked_dtype(options), config, device, host_memory().available_bytes // rank.count, form
    )
    if device.type == "cuda" and isinstance(stored, StoredForm) and fallbacks.level("quantised") == "torch":
        _tell_of_no_kernels(stored, form, config, dtype)

    def loaded(done_bytes: int, total_bytes: int) -> None:
        progress(done_bytes / max(total_bytes, 1), LOADING)

    with streams.on_device():
        make = partial(load_model, checkpoint, whole, dtype=dtype, device=device, progress=loaded, rank=rank)
        placed = plan(config, form, dtype, device)
        decoder = made(placed_form(form, placed, device), make)
    check_weight_pages()
    name = BUILTIN_NAME if options.model == BUILTIN else checkpoint.name
    seconds, gb = time.perf_counter() - started_s, weights.nbytes / 1e9
    logger.info("%s: loaded in %.2f s, %.2f GB of files, %.2f GB/s", name, seconds, gb, gb / seconds)
    blindness = why_blind(checkpoint, whole) or ""
    vision = (
        Vision(checkpoint, whole, tokenizer) if isinstance(whole, TracedConfig) and not blindness else None
    )
    identity = identity_of(checkpoint, weights)
    return LoadedModel(name, config, decoder, tokenizer, streams, vision, blindness, identity, placed)


def identity_of(checkpoint: Checkpoint, weights: Weights) -> str:
    """Return a text that differs if a model's files differ: their names, sizes and times."""
    files = {stored.file for stored in weights.tensors.values()}
    files |= set(checkpoint.path.glob("*.json")) if checkpoint.path.is_dir() else {checkpoint.path}
    if isinstance(checkpoint, GGUFCheckpoint) and checkpoint.tower is not None:
        files.add(checkpoint.tower.path)
    stats = ((file.name, file.stat()) for file in sorted(files))
    return repr([(name, status.st_size, status.st_mtime_ns) for name, status in stats])


def _plan(
    options: EngineOptions,
    rank: Rank,
    config: ModelConfig,
    form: WeightFormat,
    dtype: torch.dtype,
    device: torch.device,
) -> WeightPlan | None:
    free, rates = FreeMemory.now(device, ranks=rank.count), partial(measured_rates, device, dtype)
    plan = plan_memory(config, form, dtype, device, options, rates, free)
    if plan is not None and rank.count > 1:
        raise MemoryError(
            f"a rank's part of the weights takes {config.weight_bytes(dtype, form) / 1e9:.1f} GB, which does "
            "not fit on its GPU: divide the model among more GPUs, or choose a smaller one"
        )
    return plan


def placed_form(form: WeightFormat, placed: WeightPlan | None, device: torch.device) -> WeightFormat:
    """Return a weight format that keeps weights in host memory as planned; None: all are on the device."""
    if placed is None:
        return form
    logger.info(
        "weights: %.2f GB on the device, %.2f GB in host memory, computed by the CPU and the device together",
        placed.gpu_bytes / 1e9,
        placed.host_bytes / 1e9,
    )
    offloaded_form = host_form(form)
    if device.type == "cuda":
        offloaded_form = replace(
            offloaded_form, room=partial(weight_bytes, must_pin=placed.moves is not None)
        )
    return OffloadedFormat(form, offloaded_form, placed.resident_rows, dispatch, placed.moves)


def made(form: WeightFormat, make: Callable[..., Decoder]) -> Decoder:
    """Make a decoder in a weight format, after further tries if the system pins too little host memory.

    Then experts stay, or else tables are also in device memory.

    Args:
        make: makes it, with the keyword `form`. All memory is taken before weights are read.
    """
    for other in _with_less_pinned(form):
        try:
            return make(form=form)
        except PageableError as error:
            logger.warning("weights that must be pinned are placed in another way: %s", error)
        form = other  # only now, without the error, the memory is free again
    return make(form=form)


def _with_less_pinned(form: WeightFormat) -> Iterator[WeightFormat]:
    if isinstance(form, OffloadedFormat) and form.moves is not None:
        form = replace(form, moves=None, host_form=replace(form.host_form, room=weight_bytes))
        yield form
    if isinstance(form, OffloadedFormat) and isinstance(form.device_form, Dense):
        yield replace(form, device_form=replace(form.device_form, tables=None))
    elif isinstance(form, Dense):
        yield replace(form, tables=None)


def model_path(model: str | Path) -> Path:
    """Return the path of a checkpoint, or of the built-in model; it need not exist."""
    if model == BUILTIN:
        return Path(neo_desktop.models.__file__).parent / BUILTIN
    return Path(os.path.expanduser(model))


def open_model(model: str | Path, mmproj: Path | None = None) -> Checkpoint:
    """Open a checkpoint, or the built-in model; raise ModelError if it is missing or unusable.

    Args:
        mmproj: see `open_checkpoint`.
    """
    path = model_path(model)
    if model == "" or not path.exists():
        raise ModelError(why_missing(str(model), (BUILTIN,)))
    return open_checkpoint(path, mmproj)


def choose_device(name: str) -> torch.device:
    """Return the device with that name; "auto" takes a CUDA GPU if torch can use one.

    Raises:
        ValueError: unknown name, or the device is unavailable.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if name not in ("auto", "cuda"):
        raise ValueError(f"device {name!r} is unknown; choose one of: auto, cpu, cuda")
    if not torch.cuda.is_available():
        built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
        advice = "check the driver with nvidia-smi" if torch.version.cuda else "install a CUDA build of torch"
        raise ValueError(
            f"device 'cuda' was requested, but torch {torch.__version__} (built for {built_for}) finds no "
            f"usable GPU: {why_unusable() or advice}, or use device 'cpu'"
        )
    limit_kernels()
    return torch.device("cuda")


def gpu_form(form: Dense) -> Dense:
    """Return a format with kernels for packed matrices; tables are in host memory if that is pinned."""
    return form.on_gpu(dispatch, mapped_bytes if fallbacks.level("host_memory") == "pinned" else None)


def kept_form(
    stored: WeightFormat,
    options: EngineOptions,
    device: torch.device,
    config: ModelConfig,
    gpu_bytes: int | None = None,
) -> Dense:
    """Return the format of matrices in memory: the stored one, if requested and supported by the device.

    Without kernels a GPU converts weights to floats, because torch's operators unpack weights more slowly
    than they multiply floats. If floats do not fit, the stored format remains.

    Args:
        gpu_bytes: free memory of the GPU; None: query it.
    """
    form = stored if options.keeps_weights and isinstance(stored, StoredForm) else DENSE
    if device.type == "cpu":
        return form
    packed = gpu_form(form)
    if config.table_bytes(config.dtype, packed) > MOST_HOST_SHARE * host_memory().available_bytes:
        packed = replace(packed, tables=None)
    if form is DENSE or fallbacks.level("quantised") != "torch":
        return packed
    dtype = choose_dtype(asked_dtype(options), config, device)
    free = FreeMemory.now(device).gpu_bytes if gpu_bytes is None else gpu_bytes
    cap = options.gpu_memory_bytes
    iteration = activation_bytes(config, limits_of(options, device), dtype, device) + DEVICE_RESERVE_BYTES
    room = min(each for each in (free, cap) if each is not None) - iteration
    floats = replace(DENSE, tables=packed.tables)
    return floats if config.weight_bytes(dtype, floats) <= room else packed


def _tell_of_no_kernels(
    stored: WeightFormat, form: WeightFormat, config: ModelConfig, dtype: torch.dtype
) -> None:
    """Log the size of weights on a GPU without kernels for their stored format."""
    floats, bits = (config.weight_bytes(dtype, each) / 1e9 for each in (DENSE, stored))
    if not isinstance(form, StoredForm):
        what = f"become floats and take {floats:.1f} GB of GPU memory instead of {bits:.1f} GB"
    else:
        what = f"stay packed in {bits:.1f} GB, because {floats:.1f} GB of floats do not fit, and are slower"
    logger.warning("without Triton's kernels the weights %s", what)


def asked_dtype(options: EngineOptions) -> str:
    """Return the requested dtype, of weights or in general; or "auto"."""
    return options.dtype if options.keeps_weights else options.weights_dtype


def choose_dtype(
    name: str,
    config: ModelConfig,
    device: torch.device,
    available_bytes: int | None = None,
    form: WeightFormat = DENSE,
) -> torch.dtype:
    """Return the dtype of weights and KV; "auto" is lossless.

    On a GPU "auto" is the checkpoint's own dtype, or float16 instead of bfloat16 if the GPU has no bfloat16
    (Turing). On a CPU it is float32, which every CPU computes at full speed, unless float32 weights in this
    form would take more than half of the available memory. If a model overflows in float16, it is bfloat16,
    or float32 if the device has no bfloat16.

    Raises:
        ValueError: the GPU lacks the dtype.
    """
    has_bfloat16 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    if name == "bfloat16" and not has_bfloat16:
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} has no bfloat16: use dtype 'float16', or 'auto'"
        )
    if name in DTYPES:
        return DTYPES[name]
    dtype = config.dtype
    if dtype is not torch.float32:
        if exceeds_float16(config.architecture):
            dtype = torch.bfloat16 if has_bfloat16 else torch.float32
        elif dtype is torch.bfloat16 and not has_bfloat16:
            dtype = torch.float16
    if device.type == "cuda":
        return dtype
    available = host_memory().available_bytes if available_bytes is None else available_bytes
    if config.weight_bytes(torch.float32, form) <= available // 2:
        return torch.float32
    return dtype
