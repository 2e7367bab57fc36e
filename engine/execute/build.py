"""Construction of the model runner for a model's device."""

import torch
from torch import Tensor

from neo_desktop.engine.cuda.copies import host_flags
from neo_desktop.engine.cuda.errors import (
    DeviceStalledError,
    EngineLostError,
    StreamMemoryError,
    is_device_lost,
)
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.cuda.workspaces import clear_workspaces
from neo_desktop.engine.execute.backend import Backend, open_backend
from neo_desktop.engine.execute.layout import Capacity
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.execute.ranks.group import Group
from neo_desktop.engine.execute.round_trips import RoundTrips
from neo_desktop.engine.execute.timeline import Timeline
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.watchdog import DEFAULT_TIMEOUT, Watchdog
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.registry import stages_of

CHECK_TIMEOUT_S = 10.0  # for a program of two flags, which takes microseconds


def build_executor(
    model: Decoder,
    storage: KVStorage,
    max_tokens: int,
    max_requests: int,
    timeline: Timeline | None,
    streams: Streams,
    group: Group | None = None,
    *,
    moves_experts: bool = False,
) -> ModelRunner:
    """Build the model runner, and compile a GPU's kernels.

    Args:
        group: The tensor-parallel group; None: the model is not divided.
        moves_experts: True if experts in host memory may move to the device.
    """
    most_blocks = max((storage[tier].num_blocks for tier in storage.tiers), default=1)
    max_context = min(model.config.max_context_tokens, most_blocks * storage.block_size)
    capacity = Capacity.of(max_tokens, max_requests, max_context, storage.block_size)
    backend = open_backend(streams, timeline)
    is_gpu = model.device.type == "cuda"
    number, reduce = (0, None) if group is None else (group.rank.number, group.sum)
    stages = stages_of(model, dispatch if is_gpu else None, reduce, has_head=number == 0)
    if not is_gpu:
        return ModelRunner(stages, storage, capacity, backend, timeline=timeline, moves_experts=moves_experts)
    if fallbacks.level("graphs") == "host-flags" and any(tier.host_attends for tier in storage.tiers):
        flags = host_flags(1, model.device)
        try:
            if flags.is_pinned():
                check_flags(backend, flags[:, 0])
        except StreamMemoryError as error:
            fallbacks.limit("graphs", "device-only", str(error))
    assert streams.sms is not None  # the device is a GPU
    with streams.on_device():
        q = torch.empty(
            1, model.config.num_heads, model.config.head_dim, dtype=model.dtype, device=model.device
        )
        num_programs = streams.sms * _programs_per_sm(q, storage)
    executor = ModelRunner(
        stages,
        storage,
        capacity,
        backend,
        num_programs=num_programs,
        uses_gpu=True,
        timeline=timeline,
        moves_experts=moves_experts,
    )
    if fallbacks.level("graphs") != "eager" and not executor.fits_graphs:
        fallbacks.limit("graphs", "eager", "graphs need pinned host memory, and some of it is pageable")
    executor.warm_up()
    # Iterations often run on another thread, which has its own cuBLAS workspace. Graphs captured here would
    # keep this thread's workspace allocated for ever, so the other thread captures its own graphs.
    backend.forget()
    clear_workspaces(model.device)
    return executor


def _programs_per_sm(q: Tensor, storage: KVStorage) -> int:
    for tier in storage.tiers:
        if not tier.host_attends:
            k_caches, v_caches = storage[tier].parts[0], storage[tier].parts[-1]
            return dispatch.programs_per_sm(q, k_caches[0], v_caches[0])
    return 1


def check_flags(backend: Backend, flags: Tensor) -> None:
    """Test that a program can raise a flag and wait for it, both launched and as a graph.

    Args:
        backend: Drops its programs afterwards.
        flags: [1 or 2, ints] int32 in pinned host memory; the program raises and awaits the first flag.

    Raises:
        StreamMemoryError: The driver refuses, or the flag does not arrive.
        DeviceLostError: The GPU does not return from the wait.
    """
    program = RoundTrips(flags[:1].expand(2, -1).unsqueeze(1)).program("check flags")
    try:
        backend.begin(Watchdog(CHECK_TIMEOUT_S))
        for way in ("at once", "by a graph"):
            flags.zero_()
            with backend.on_device():
                backend.start(program, with_flags=True, with_graphs=True)
            backend.wait()
            if flags[0, 0].item() != 1:
                raise StreamMemoryError(f"a stream's write to host memory {way} did not arrive")
    except DeviceStalledError as error:
        flags.fill_(1)  # releases the GPU if it still waits for the flag
        raise backend.abandon(error) or StreamMemoryError(
            f"a stream that waits for a word in host memory waits for ever: {error}"
        ) from error
    except (StreamMemoryError, EngineLostError):
        raise
    except RuntimeError as error:  # raised by torch during the capture
        if is_device_lost(error):
            raise
        raise StreamMemoryError(str(error)) from error
    finally:
        backend.begin(DEFAULT_TIMEOUT.watch())
        backend.forget()
