"""Sets up what drafts from a model's hidden states: its own layer of multi-token prediction, or an assistant.

Both are on the model's device, with the model's embedding; a layer also has the model's output head. Their
memory is planned together with the model's weights and KV: `plan_beside` is for set-up and for predictions
alike. If many weights of the model would have to leave the GPU for them, they are not used.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Self

import torch

from neo_desktop.engine.cuda.errors import is_lost
from neo_desktop.engine.drafting import (
    MOST_REQUESTS,
    DrafterExecutor,
    Drafting,
    charged,
    kv_block_bytes,
    num_kv_blocks,
)
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.loading import LoadedModel, kept_form, model_path
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.predict.weight_plan import WeightPlan
from neo_desktop.engine.profiling.budget import FreeMemory, activation_bytes
from neo_desktop.engine.profiling.rates import measured_rates
from neo_desktop.engine.profiling.weight_memory import plan_memory
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.speculate.assistant_head import AssistantHead
from neo_desktop.engine.speculate.draft_model import DraftLimits
from neo_desktop.engine.speculate.kept_states import MOST_TOKENS, most_bytes
from neo_desktop.engine.speculate.mtp_head import MtpHead
from neo_desktop.engine.unused_memory import return_memory
from neo_desktop.models.checkpoint import Checkpoint
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.registry import (
    assistant_folder,
    check_model,
    load_prediction,
    open_assistant,
    open_prediction,
    stages_of,
)
from neo_desktop.models.safetensors.folder import SafetensorsFolder
from neo_desktop.models.stored_form import stored_form
from neo_desktop.models.stored_tensor import StoredTensor
from neo_desktop.models.traced.assistant import Pairing
from neo_desktop.models.traced.config import TracedConfig
from neo_desktop.models.weights import Weights, may_predict

logger = logging.getLogger(__name__)

# Most weights in host memory beside a layer, relative to those without it. An iteration takes about as much
# longer, and drafts gain more than that.
MOST_ON_HOST = 1.2


class Layer(NamedTuple):
    """A model's layer of multi-token prediction, or its assistant."""

    config: TracedConfig
    stored: WeightFormat  # of its matrices in its files

    @property
    def is_assistant(self) -> bool:
        return self.config.source.predicts == "assistant"

    @property
    def source(self) -> str:
        """The value of the option `speculate` that allows nothing else."""
        return "draft" if self.is_assistant else "mtp"

    @property
    def named(self) -> str:
        return "assistant" if self.is_assistant else "layer of multi-token prediction"

    @property
    def most_tokens(self) -> int:
        """Tokens of a request whose hidden states are kept."""
        return 1 if self.is_assistant else MOST_TOKENS

    @property
    def width(self) -> int:
        """Numbers of a hidden state of the model."""
        spec = self.config.of_model
        return spec.parameters[spec.embedding][1]

    @classmethod
    def of(cls, checkpoint: Checkpoint, config: ModelConfig, weights: Weights) -> Self | None:
        """Return the layer of a checked model; None: it has none that can be used.

        Args:
            weights: `check_model`.
        """
        if not weights.predicting or not isinstance(config, TracedConfig):
            return None
        try:
            own, tensors = open_prediction(checkpoint, config, weights.predicting)
        except ModelError:
            return None
        return cls(own, stored_form(tensors, own))

    @classmethod
    def of_assistant(cls, folder: SafetensorsFolder, config: ModelConfig) -> Self:
        """Return an assistant; raises ModelError unless it was made for a model with this config."""
        own, weights, _ = open_assistant(folder, config)
        return cls(own, stored_form(weights, own))


class Beside(NamedTuple):
    """A layer's memory, and what it leaves to the model."""

    plan: WeightPlan | None  # of the model's weights
    options: EngineOptions  # for the model: limits on memory are lower by the layer's
    free: FreeMemory  # for the model
    form: WeightFormat  # of the layer's matrices in memory
    num_blocks: int  # of its KV
    nbytes: int  # of its weights and KV


def may_draft(layer: Layer, options: EngineOptions) -> bool:
    """Return True if the options let a layer or an assistant draft."""
    is_meant = (options.draft_model is not None) == layer.is_assistant
    return is_meant and options.speculate in ("auto", layer.source) and options.tensor_parallel == 1


def plan_beside(
    layer: Layer,
    dtype: torch.dtype,
    device: torch.device,
    options: EngineOptions,
    free: FreeMemory,
    plan: Callable[[EngineOptions, FreeMemory], WeightPlan | None],
) -> Beside:
    """Plan the placement of the model's weights beside its layer.

    Args:
        plan: plans the placement of the model's weights.

    Raises:
        MemoryError: the layer does not fit, or weights of the model would leave the GPU for it.
    """
    config = layer.config
    form = kept_form(layer.stored, options, device, config, free.gpu_bytes)
    num_blocks = 0 if layer.is_assistant else num_kv_blocks(config, dtype, options, free)
    kv = num_blocks * kv_block_bytes(config, dtype)
    nbytes = own_bytes(config, dtype, form) + kv
    limits = SchedulerLimits(max(layer.most_tokens, MOST_REQUESTS), MOST_REQUESTS)
    taken = nbytes + activation_bytes(config, limits, dtype, device)
    cap, caps = ("gpu_memory_gib", taken) if device.type == "cuda" else ("cpu_memory_gib", kv)
    left = charged(options, cap, caps, f"the {layer.named}")
    rest = free.without(taken)
    kept = most_bytes(MOST_REQUESTS, layer.width, layer.most_tokens)
    rest = replace(rest, host_bytes=rest.host_bytes - kept)
    placed = plan(left, rest)
    if placed is not None:
        alone = plan(options, free)
        more = placed.host_bytes - (0 if alone is None else alone.host_bytes)
        if more > (1 - 1 / MOST_ON_HOST) * placed.host_bytes:
            raise MemoryError(f"{more / 1e9:.2f} GB more of the model's weights would be in host memory")
    return Beside(placed, left, rest, form, num_blocks, nbytes)


def drafting_of(options: EngineOptions, checkpoint: Checkpoint | None) -> "Drafting | MtpDrafting | None":
    """Return what computes drafts for a model; None: nothing does.

    Raises:
        ValueError, ModelError: see `Drafting`, `MtpDrafting.of` and `open_assistant`.
    """
    if options.draft_model is None or checkpoint is None:
        return MtpDrafting.of(options, checkpoint)
    assistant = assistant_folder(model_path(options.draft_model))
    if assistant is None:
        return Drafting(options, checkpoint)
    return MtpDrafting(options, assistant.name, *open_assistant(assistant, checkpoint.config()))


class MtpDrafting:
    """The layer of multi-token prediction of an engine's model, or its assistant; see `of`.

    Args:
        name: of the model or of the assistant.
        pairing: None: a layer.
    """

    def __init__(
        self,
        options: EngineOptions,
        name: str,
        config: TracedConfig,
        weights: Weights,
        pairing: Pairing | None = None,
    ) -> None:
        self.options = options  # for the model: the layer's memory does not count as free
        self._layer = Layer(config, stored_form(weights, config))
        self._name, self._config, self._weights, self._pairing = name, config, weights, pairing
        self._assistant: AssistantHead | None = None
        self._who = name if pairing is not None else f"{name}: its {self._layer.named}"
        self._is_required = options.speculate == self._layer.source
        self._beside: Beside | None = None  # set by `plan`; None: the layer is not used
        self._executor = DrafterExecutor()

    @classmethod
    def of(cls, options: EngineOptions, checkpoint: Checkpoint | None) -> "MtpDrafting | None":
        """Return the layer of a checkpoint's model; None: it has none, or shall not draft.

        Args:
            checkpoint: None: the weights are random.

        Raises:
            ValueError: `speculate` is "mtp", and another option excludes that.
            ModelError: the model cannot be used, or `speculate` is "mtp" and its layer cannot.
        """
        if options.speculate not in ("auto", "mtp"):
            return None
        if checkpoint is None or options.tensor_parallel > 1:
            if options.speculate == "mtp":
                raise ValueError("speculate 'mtp' does not go with shape or tensor_parallel: choose 'auto'")
            return None
        main, tensors = checkpoint.config(), dict[str, StoredTensor]()
        if isinstance(main, TracedConfig) and may_predict(checkpoint.weights().tensors):
            tensors = check_model(checkpoint, main).predicting
        if not tensors or not isinstance(main, TracedConfig):
            if options.speculate == "mtp":
                raise ModelError(
                    f"{checkpoint.name} has no layer of multi-token prediction that drafts: choose another "
                    "way to speculate, such as 'auto'."
                )
            return None
        try:
            return cls(options, checkpoint.name, *open_prediction(checkpoint, main, tensors))
        except ModelError as error:
            if options.speculate == "mtp":
                raise
            logger.warning("%s: its layer of multi-token prediction is not used: %s", checkpoint.name, error)
            return None

    def plan(
        self, config: ModelConfig, form: WeightFormat, dtype: torch.dtype, device: torch.device
    ) -> WeightPlan | None:
        """Plan the placement of the model's weights beside the layer: a `Planner`."""
        rates = partial(measured_rates, device, dtype)

        def plan(options: EngineOptions, free: FreeMemory) -> WeightPlan | None:
            return plan_memory(config, form, dtype, device, options, rates, free)

        free = FreeMemory.now(device)
        try:
            self._beside = plan_beside(self._layer, dtype, device, self.options, free, plan)
        except MemoryError as error:
            if self._is_required:
                raise MemoryError(f"{self._who} does not fit: {error}") from None
            # Its user named an assistant; a layer of its own is the model's matter.
            level = logging.INFO if self._pairing is None else logging.WARNING
            logger.log(level, "%s is not used: %s", self._who, error)
            return plan(self.options, free)
        self.options = self._beside.options
        return self._beside.plan

    def attach(self, loaded: LoadedModel) -> MtpHead | AssistantHead | None:
        """Load it beside the loaded model, and measure a layer; None: it is not used.

        Raises:
            Exception: it cannot be used, and `speculate` allows nothing else.
            EngineLostError, RuntimeError: the GPU is lost.
        """
        if self._beside is None:
            return None
        try:
            head = self._head(loaded, self._beside)
            logger.info("%s drafts, in %.2f GB", self._who, self._beside.nbytes / 1e9)
            return head
        except Exception as error:  # any exception: the model works without the layer
            if is_lost(error) or self._is_required:
                raise
            why = str(error)
        self.close()
        logger.warning("%s is not used: %s", self._who, why)
        return None

    def _head(self, loaded: LoadedModel, beside: Beside) -> MtpHead | AssistantHead:
        with loaded.streams.on_device():
            decoder = load_prediction(self._config, self._weights, loaded.decoder, beside.form)
        if self._pairing is not None:
            operators = dispatch if decoder.device.type == "cuda" else None
            stages = stages_of(decoder, operators)
            head = AssistantHead(decoder, stages, self._pairing, loaded.streams, MOST_REQUESTS, return_memory)
            self._assistant = head
            return head
        vocab_size = loaded.config.vocab_size
        limits = DraftLimits(
            self._config.max_context_tokens, vocab_size, vocab_size, MOST_TOKENS, MOST_REQUESTS
        )
        execute, kv = self._executor.build(decoder, loaded.streams, beside.num_blocks, limits)
        return MtpHead(execute, kv, self.close, limits)

    def close(self) -> None:
        """End the layer's threads and drop its memory; may be called again."""
        self._executor.close()
        if self._assistant is not None:
            self._assistant.close()


def own_bytes(config: TracedConfig, dtype: torch.dtype, form: WeightFormat) -> int:
    """Return the bytes of a layer's weights, without the model's embedding and output head."""
    own = {matrix.name for matrix in config.own_matrices}
    shared = sum(
        form.named(matrix.name).nbytes(matrix.rows, matrix.columns, dtype)
        for matrix in config.all_matrices
        if matrix.name not in own and (not matrix.is_table or form.tables is None)
    )
    return config.weight_bytes(dtype, form) - shared
