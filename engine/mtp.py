"""Sets up a model's own layer of multi-token prediction as its drafter.

The layer is on the model's device, with the model's embedding and output head. Plans of the model's weights
leave room for it. If some weights of the model would have to leave the GPU for it, it is not used.
"""

import logging
from functools import partial

import torch

from neo_desktop.engine.cuda.errors import is_lost
from neo_desktop.engine.drafting import (
    MOST_REQUESTS,
    DrafterExecutor,
    charged,
    kv_block_bytes,
    num_kv_blocks,
    room_for_kv,
)
from neo_desktop.engine.loading import LoadedModel, kept_form
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.predict.weight_plan import WeightPlan
from neo_desktop.engine.profiling.budget import FreeMemory, activation_bytes
from neo_desktop.engine.profiling.rates import measured_rates
from neo_desktop.engine.profiling.weight_memory import plan_memory
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.speculate.draft_model import DraftLimits
from neo_desktop.engine.speculate.kept_states import MOST_TOKENS
from neo_desktop.engine.speculate.mtp_head import MtpHead
from neo_desktop.models.checkpoint import Checkpoint
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.leftovers import may_predict
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.registry import check_model, load_prediction, open_prediction
from neo_desktop.models.stored_form import stored_form
from neo_desktop.models.stored_tensor import StoredTensor
from neo_desktop.models.traced.config import TracedConfig
from neo_desktop.models.weights import Weights

logger = logging.getLogger(__name__)

LIMITS = SchedulerLimits(MOST_TOKENS, MOST_REQUESTS)  # of the layer's iterations


class MtpDrafting:
    """The layer of multi-token prediction of an engine's model; see `of`."""

    def __init__(self, options: EngineOptions, name: str, config: TracedConfig, weights: Weights) -> None:
        self.options = options  # for the model: the layer's memory does not count as free
        self._name, self._config, self._weights = name, config, weights
        self._form: WeightFormat | None = None  # set by `plan`; None: the layer is not used
        self._num_blocks = self._nbytes = 0  # of its KV; of its weights and KV
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
        plan = partial(plan_memory, config, form, dtype, device, rates=partial(measured_rates, device, dtype))
        own = kept_form(stored_form(self._weights, self._config), self.options, device, self._config)
        free = FreeMemory.now(device)
        num_blocks = num_kv_blocks(self._config, dtype, room_for_kv(self.options, free))
        kv = num_blocks * kv_block_bytes(self._config, dtype)
        nbytes = own_bytes(self._config, dtype, own) + kv
        taken = nbytes + activation_bytes(self._config, LIMITS, dtype, device)
        try:
            cap, caps = ("gpu_memory_gib", taken) if device.type == "cuda" else ("cpu_memory_gib", kv)
            options = charged(self.options, cap, caps, "the layer of multi-token prediction")
            if (placed := plan(options, free=free.without(taken))) is None:
                self.options, self._form, self._num_blocks, self._nbytes = options, own, num_blocks, nbytes
                return None
            why = f"{placed.host_bytes / 1e9:.2f} GB of the model's weights would be in host memory"
        except MemoryError as error:
            why = str(error)
        if self.options.speculate == "mtp":
            raise MemoryError(f"{self._name}: its layer of multi-token prediction does not fit: {why}")
        logger.info("%s: its layer of multi-token prediction is not used: %s", self._name, why)
        return plan(self.options)

    def attach(self, loaded: LoadedModel) -> MtpHead | None:
        """Load the layer beside the loaded model, and measure it; None: it is not used.

        Raises:
            Exception: it cannot be used, and `speculate` is "mtp".
            EngineLostError, RuntimeError: the GPU is lost.
        """
        if self._form is None:
            return None
        try:
            return self._attach(loaded, self._form)
        except Exception as error:  # any exception: the model works without the layer
            if is_lost(error) or self.options.speculate == "mtp":
                raise
            why = str(error)
        self.close()
        logger.warning("%s: its layer of multi-token prediction is not used: %s", self._name, why)
        return None

    def _attach(self, loaded: LoadedModel, form: WeightFormat) -> MtpHead:
        with loaded.streams.on_device():
            decoder = load_prediction(self._config, self._weights, loaded.decoder, form)
        vocab_size = loaded.config.vocab_size
        limits = DraftLimits(
            self._config.max_context_tokens, vocab_size, vocab_size, MOST_TOKENS, MOST_REQUESTS
        )
        execute, kv = self._executor.build(decoder, loaded.streams, self._num_blocks, limits)
        head = MtpHead(execute, kv, self.close, limits)
        logger.info(
            "%s: its layer of multi-token prediction drafts, in %.2f GB", self._name, self._nbytes / 1e9
        )
        return head

    def close(self) -> None:
        """End the layer's threads and drop its memory; may be called again."""
        self._executor.close()


def own_bytes(config: TracedConfig, dtype: torch.dtype, form: WeightFormat) -> int:
    """Return the bytes of a layer's weights, without the model's embedding and output head."""
    shared = form.named("embedding").nbytes(config.vocab_size, config.hidden_size, dtype)
    head = config.of_model.head
    if head is not None:
        shared += form.named("head").nbytes(head.rows[0], head.columns, dtype)
    return config.weight_bytes(dtype, form) - shared
