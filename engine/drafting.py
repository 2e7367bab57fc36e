"""Sets up a draft model beside the model: its place, its memory and its executor.

Its weights, KV and iterations take their memory before the model's weights are placed, so all later plans
find less free memory. It is on the GPU if all weights of the model fit there as well. Otherwise it is in host
memory, and the CPU computes it: weights of the model that leave the GPU would cost more than drafts gain.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from neo_desktop.engine.batch import IterationPlan, IterationResult
from neo_desktop.engine.cuda.errors import is_short_of_memory
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.execute.build import build_executor
from neo_desktop.engine.execute.executor import Executor
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv.layer import block_bytes
from neo_desktop.engine.kv.layout import BLOCK_SIZE, BLOCKS_PER_RUN
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.kv.streamed import make_pool
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.loading import LoadedModel, asked_dtype, choose_dtype, kept_form, load, open_model
from neo_desktop.engine.options import GIB, MAX_BATCH_TOKENS, EngineOptions
from neo_desktop.engine.predict.weight_plan import WeightPlan
from neo_desktop.engine.profiling.budget import FreeMemory
from neo_desktop.engine.profiling.rates import measured_rates
from neo_desktop.engine.profiling.weight_memory import check_weights_fit, plan_memory
from neo_desktop.engine.speculate.draft_model import DraftLimits, DraftModel
from neo_desktop.engine.unused_memory import return_memory
from neo_desktop.models.checkpoint import Checkpoint
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.linear.protocol import WeightFormat

logger = logging.getLogger(__name__)

MOST_REQUESTS = 16  # that get drafts together: with more, drafts hardly pay
KV_SHARE = 0.02  # most of the free memory that the draft model's KV takes
KV_CONTEXTS = 8  # most of its longest contexts that it holds
HOST = torch.device("cpu")
WHAT = "the draft model"


class DrafterExecutor:
    """The executor and the KV of a drafter."""

    def __init__(self) -> None:
        self._executor: Executor | None = None

    def build(
        self, decoder: Decoder, streams: Streams, num_blocks: int, limits: DraftLimits
    ) -> tuple[Callable[[IterationPlan], IterationResult], KVCache]:
        """Return the function that carries out plans, and the block counts of KV.

        The KV's memory is written once, so that it does not count as free.
        """
        with streams.on_device():
            pool = make_pool(
                KVTier.DEVICE, decoder.config, num_blocks, decoder.dtype, decoder.device, decoder.sinks
            )
            for part in pool.parts:
                part.zero_()
        storage = KVStorage({KVTier.DEVICE: pool})
        self._executor = executor = build_executor(
            decoder, storage, limits.max_tokens, limits.most_requests, None, streams
        )
        return executor.execute, KVCache({KVTier.DEVICE: num_blocks}, BLOCK_SIZE)

    def close(self) -> None:
        """End the drafter's threads and drop its memory; may be called again."""
        if self._executor is not None:
            self._executor.close()
            self._executor = None
        return_memory()


class Drafting:
    """The draft model of an engine.

    Raises:
        ModelError: it cannot be used, or its vocabulary differs from the model's.
    """

    def __init__(self, options: EngineOptions, model: Checkpoint) -> None:
        assert options.draft_model is not None
        self.options = options  # for the model: memory that the draft model took does not count as free
        self.drafter: DraftModel | None = None  # set by `plan`
        self._executor = DrafterExecutor()
        self._checkpoint = checkpoint = open_model(options.draft_model)
        self._name = checkpoint.name
        if checkpoint.config().state_bytes:
            raise ModelError(
                f"{self._name} has recurrent layers and cannot draft: choose another draft model."
            )
        difference = model.tokenizer().difference(checkpoint.tokenizer())
        if difference is not None:
            raise ModelError(
                f"{self._name} cannot draft for {model.name}, since their vocabularies differ: {difference}."
            )

    def plan(
        self, config: ModelConfig, form: WeightFormat, dtype: torch.dtype, device: torch.device
    ) -> WeightPlan | None:
        """Load the draft model, and plan the placement of the model's weights beside it: a `Planner`."""
        plan = partial(plan_memory, config, form, dtype, device, rates=partial(measured_rates, device, dtype))
        if device.type == "cuda":
            free = FreeMemory.now(device)
            try:
                self._load(device, config.vocab_size)
                taken = free.device_bytes - FreeMemory.now(device).device_bytes
                options = charged(self.options, "gpu_memory_gib", taken, WHAT)
                if plan(options) is None:
                    self.options = options
                    logger.info("%s drafts on the GPU, in %.2f GB", self._name, taken / 1e9)
                    return None
            except (MemoryError, RuntimeError) as error:
                if not is_short_of_memory(error):
                    raise
            self.drafter = None  # the model and the draft model do not fit together
            self._executor.close()
        taken = self._load(HOST, config.vocab_size)
        self.options = charged(self.options, "cpu_memory_gib", taken, WHAT)
        logger.info("%s drafts on the CPU, with %.2f GB of KV", self._name, taken / 1e9)
        return plan(self.options)

    def attach(self, _: LoadedModel) -> DraftModel | None:
        """Return the drafter, once the model is loaded."""
        return self.drafter

    def close(self) -> None:
        """End the draft model's threads and drop its memory; may be called again."""
        if self.drafter is None:
            self._executor.close()
        else:
            self.drafter.close()  # which releases the memory

    def _load(self, device: torch.device, vocab_size: int) -> int:
        """Load the draft model on a device, and measure it; return the bytes of its KV."""
        options = _own_options(self.options, device)
        loaded = load(options, checkpoint=self._checkpoint)
        decoder, config = loaded.decoder, loaded.config
        num_blocks = num_kv_blocks(config, decoder.dtype, options, FreeMemory.now(decoder.device))
        limits = DraftLimits(
            config.max_context_tokens,
            config.vocab_size,
            vocab_size,
            MAX_BATCH_TOKENS[device.type],
            MOST_REQUESTS,
        )
        execute, kv = self._executor.build(decoder, loaded.streams, num_blocks, limits)
        self.drafter = DraftModel(execute, kv, self._executor.close, limits)
        return num_blocks * kv_block_bytes(config, decoder.dtype)


def plan_beside(
    draft: ModelConfig,
    stored: WeightFormat,
    options: EngineOptions,
    device: torch.device,
    free: FreeMemory,
    plan: Callable[[EngineOptions, FreeMemory], WeightPlan | None],
) -> tuple[EngineOptions, FreeMemory]:
    """Predict the options and the free memory that `Drafting.plan` leaves for the model.

    Args:
        stored: the draft model's format of matrices in its files.
        plan: plans the placement of the model's weights.

    Raises:
        MemoryError: the draft model does not fit.
    """
    if device.type == "cuda":
        with suppress(MemoryError):
            left = _left(draft, stored, options, device, free)
            if plan(*left) is None:
                return left
    return _left(draft, stored, options, HOST, free)


def _left(
    draft: ModelConfig, stored: WeightFormat, options: EngineOptions, device: torch.device, free: FreeMemory
) -> tuple[EngineOptions, FreeMemory]:
    """Return the options and the free memory beside a draft model on this device."""
    own, is_gpu = _own_options(options, device), device.type == "cuda"
    left = free if is_gpu else replace(free, gpu_bytes=None)
    form = kept_form(stored, own, device, draft, free.gpu_bytes)
    dtype = choose_dtype(asked_dtype(own), draft, device, free.host_bytes, form)
    check_weights_fit(draft, dtype, device, own, left, form)
    weights = draft.weight_bytes(dtype, form)
    left = left.without(weights)
    kv = num_kv_blocks(draft, dtype, own, left) * kv_block_bytes(draft, dtype)
    left = left.without(kv)
    if is_gpu:
        return charged(options, "gpu_memory_gib", weights + kv, WHAT), left
    return charged(options, "cpu_memory_gib", kv, WHAT), replace(left, gpu_bytes=free.gpu_bytes)


def _own_options(options: EngineOptions, device: torch.device) -> EngineOptions:
    """Return the options that load the draft model on a device."""
    assert options.draft_model is not None
    weights_dtype = options.weights_dtype
    if device == HOST and weights_dtype == "exact":  # a CPU's kernels round inputs
        weights_dtype = "auto"
    return replace(
        options,
        model=options.draft_model,
        draft_model=None,
        mmproj=None,
        speculate="off",
        device=device.type,
        weights_dtype=weights_dtype,
        gpu_weights_gib=None,
        gpu_slice=options.gpu_slice if device.type == "cuda" else None,
    )


def kv_block_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a block in all layers."""
    return config.num_layers * block_bytes(config, BLOCK_SIZE, dtype)


def num_kv_blocks(config: ModelConfig, dtype: torch.dtype, options: EngineOptions, free: FreeMemory) -> int:
    """Return the KV blocks of a drafter; `free`: after its weights are loaded."""
    cap = options.gpu_memory_bytes if free.gpu_bytes is not None else options.cpu_memory_bytes
    room = int(KV_SHARE * (free.device_bytes if cap is None else min(free.device_bytes, cap)))
    run_bytes = BLOCKS_PER_RUN * kv_block_bytes(config, dtype)
    run_tokens = BLOCKS_PER_RUN * BLOCK_SIZE
    most = KV_CONTEXTS * -(-config.max_context_tokens // run_tokens)
    return BLOCKS_PER_RUN * max(min(room // run_bytes, most), 1)


def charged(options: EngineOptions, cap: str, taken: int, what: str) -> EngineOptions:
    """Return the options with a limit on memory that is lower by a drafter's bytes.

    Raises:
        MemoryError: the drafter takes more than the limit.
    """
    gib = getattr(options, cap)
    if gib is None:
        return options
    if gib <= taken / GIB:
        raise MemoryError(
            f"{what} takes {taken / GIB:.2f} GiB of {cap}, which is {gib:.2f}: raise it, or choose "
            "a smaller draft model or speculate 'ngram'"
        )
    return replace(options, **{cap: gib - taken / GIB})
