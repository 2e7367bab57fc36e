"""The fit of a model in this computer's memory, and the room for chats, by the engine's own rules."""

from dataclasses import dataclass, replace

from neo_desktop.app.shelf.checkpoint_summary import LocalModel
from neo_desktop.app.shelf.speed import MachineFigures, Speed, predict, predict_by
from neo_desktop.engine import mtp
from neo_desktop.engine.drafting import plan_beside
from neo_desktop.engine.execute.weight_stream import streaming_bytes
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv_tier import MEASURED_TIERS
from neo_desktop.engine.loading import asked_dtype, choose_device, choose_dtype, kept_form
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.predict.offloaded_matmul import Rates
from neo_desktop.engine.predict.weight_plan import WeightPlan, layer_matrices
from neo_desktop.engine.profiling.budget import CHAT_TOKENS, FreeMemory, KVBudget
from neo_desktop.engine.profiling.profile_cache import find_tables
from neo_desktop.engine.profiling.weight_memory import plan_memory, smaller_form
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


@dataclass(frozen=True, slots=True)
class Fit:
    """Result of a prediction; only `reason` counts where the model does not fit."""

    reason: str | None  # why it does not fit; None: it does
    dtype: str  # of weights and KV
    weights_bytes: int  # over every rank
    host_weights_bytes: int  # that a GPU has no room for
    table_bytes: int  # of embeddings in host memory, where a GPU looks them up
    weights_become: str  # the form in memory: "float32", or what happens to quantised ones
    kv_bytes_per_1000_tokens: int
    gpu_tokens: int  # in the GPU-cache
    cpu_tokens: int  # in the CPU-cache
    chat_tokens: int  # 4,096, or the model's shorter context
    gpu_chats: int  # with KV in the GPU-cache
    chats: int  # with those in the CPU-cache
    most_chats: int  # at once, with any memory
    is_imitated: bool  # no GPU: both caches are in host memory
    speed: Speed | None
    speed_reason: str | None  # why there is none


class Fitting:
    """Predicts the memory and the speed of a model.

    Parts are those of one rank: a GPU of its own, and its share of the host's memory.

    Args:
        free: memory, with no model loaded.
        figures: of this computer, or the reason why they are unknown.
        stored: the form of its matrices on a CPU, where some are quantised.
        draft: the draft model beside it, with a config; None: there is none.
        layer: its layer of multi-token prediction or its assistant; None: it has none that can draft.
    """

    def __init__(
        self,
        whole: ModelConfig,
        options: EngineOptions,
        free: FreeMemory,
        figures: MachineFigures | str,
        stored: WeightFormat = DENSE,
        draft: LocalModel | None = None,
        layer: mtp.Layer | None = None,
    ) -> None:
        self.whole, self.options, self.figures, self.stored = whole, options, figures, stored
        self.device = device = choose_device(options.device)
        self.whole_form = kept_form(stored, options, device, whole, free.gpu_bytes)
        rank, reason = Rank(0, options.tensor_parallel), None
        try:
            config = config_of_rank(whole, rank)
        except ModelError as error:
            config, reason, rank = whole, str(error), ALONE
        self.config, self.rank = config, rank
        self.free = replace(free, host_bytes=free.host_bytes // rank.count)
        own = form_of_rank(stored, whole, rank)
        self.form = kept_form(own, options, device, config, self.free.gpu_bytes)
        self.dtype = choose_dtype(asked_dtype(options), config, device, self.free.host_bytes, self.form)
        self.weights = config.weight_bytes(self.dtype, self.form)
        self.rates = _rates(figures, config)
        self.plan: WeightPlan | None = None
        self.tokens = dict.fromkeys(MEASURED_TIERS, 0)
        self.most_requests = options.most_requests  # that run at the same time
        lead = ""
        try:
            if draft is not None:
                lead = "the draft model does not fit: "
                assert draft.config is not None
                self.options, self.free = plan_beside(
                    draft.config, draft.form, options, device, self.free, self._weight_plan
                )
                lead = "beside the draft model, "
            elif layer is not None and mtp.may_draft(layer, options):
                self._place_layer(layer)
            self._place_memory()
            self.reason = reason or self._why_no_chats()
        except MemoryError as error:
            self.reason = reason or f"{lead}{error}"
        self.chat_tokens = min(CHAT_TOKENS, config.max_context_tokens)
        self.chats, left = dict.fromkeys(self.tokens, 0), self.most_requests
        for tier, count in self.tokens.items():
            self.chats[tier] = min(count // self.chat_tokens, left)
            left -= self.chats[tier]

    def _place_layer(self, layer: mtp.Layer) -> None:
        try:
            beside = mtp.plan_beside(
                layer, self.dtype, self.device, self.options, self.free, self._weight_plan
            )
        except MemoryError as error:
            if self.options.speculate == layer.source:
                raise MemoryError(f"its {layer.named} does not fit: {error}") from None
            return  # it is not used
        self.options, self.free = beside.options, beside.free

    def _weight_plan(self, options: EngineOptions, free: FreeMemory) -> WeightPlan | None:
        return plan_memory(self.config, self.form, self.dtype, self.device, options, lambda: self.rates, free)

    def _place_memory(self) -> None:
        config, dtype, device, options = self.config, self.dtype, self.device, self.options
        self.plan = plan = self._weight_plan(options, self.free)
        tiers = get_policy(options.policy).tiers
        budget = KVBudget(
            config,
            dtype,
            device,
            options,
            self._beside_weights(),
            self.weights if plan is None else plan.gpu_bytes,
            tiers,
            self.rates.bus_bytes_per_s / self.rates.gpu_bytes_per_s,
            has_host_weights=plan is not None,
            planned_tokens=None if plan is None else plan.device_tokens,
        )
        self.most_requests = budget.most_requests
        blocks = budget.num_blocks()
        self.tokens |= {tier: BLOCK_SIZE * blocks.get(tier, 0) for tier in MEASURED_TIERS if tier in tiers}

    def _beside_weights(self) -> FreeMemory:
        free, plan = self.free, self.plan
        if free.gpu_bytes is None:
            return FreeMemory(free.host_bytes - self.weights, None)
        host_bytes = free.host_bytes - self.config.table_bytes(self.dtype, self.form)
        if plan is None:
            return FreeMemory(host_bytes, free.gpu_bytes - self.weights)
        streaming = streaming_bytes(layer_matrices(self.config, self.form, self.dtype))
        return FreeMemory(host_bytes - plan.host_bytes, free.gpu_bytes - plan.gpu_bytes - streaming)

    def _why_no_chats(self) -> str | None:
        if any(self.tokens.values()):
            return None
        room = self.free.host_bytes if self.free.gpu_bytes is None else self.free.gpu_bytes
        smaller = smaller_form(self.config, self.dtype, self.device, room, self.weights)
        return f"the weights fit, but no memory is left for chats: {smaller}close other programs"

    def _speed(self) -> Speed | str:
        """Predict the speed, or return the reason why there is no prediction."""
        if self.rank.count > 1:
            return "that of divided models is not predicted"
        if self.reason is not None:
            return "it does not fit"
        if not any(self.chats.values()):
            return f"only {max(self.tokens.values()):,} tokens of context have room"
        config, dtype, form, plan = self.config, self.dtype, self.form, self.plan
        has_room = tuple(self.chats.items())
        on_host = plan.host_bytes / (plan.gpu_bytes + plan.host_bytes) if plan else 0.0
        tables = find_tables(config, dtype, self.device, forms_of(form, config), on_host)
        if tables is not None:
            return predict_by(tables, has_room, self.chat_tokens)
        if isinstance(self.figures, str):
            return self.figures
        divided = None
        if self.figures.has_gpu:
            divided = DividedWeights.of(plan, self.rates, config, form, dtype)
        read = bytes_read(config, dtype, form)
        return predict(self.figures, config, dtype, has_room, self.chat_tokens, read, divided)

    def fit(self) -> Fit:
        speed, plan = self._speed(), self.plan
        tables = self.whole.table_bytes(self.dtype, self.whole_form)
        dtype_name = str(self.dtype).removeprefix("torch.")
        is_quantised = isinstance(self.stored, StoredForm) and bool(self.stored.stored)
        tokens = {tier.label: count for tier, count in self.tokens.items()}
        gpu_chats = sum(count for tier, count in self.chats.items() if not tier.in_host_memory)
        return Fit(
            reason=self.reason,
            dtype=dtype_name,
            weights_bytes=self.whole.weight_bytes(self.dtype, self.whole_form) + tables,
            host_weights_bytes=0 if plan is None else plan.host_bytes,
            table_bytes=tables,
            weights_become=what_becomes(self.form, self.dtype) if is_quantised else dtype_name,
            kv_bytes_per_1000_tokens=1000 * self.rank.count * self.config.kv_bytes_per_token(self.dtype),
            gpu_tokens=tokens["gpu"],
            cpu_tokens=tokens["cpu"],
            chat_tokens=self.chat_tokens,
            gpu_chats=gpu_chats,
            chats=sum(self.chats.values()),
            most_chats=self.options.most_requests,
            is_imitated=self.device.type != "cuda",
            speed=None if isinstance(speed, str) else speed,
            speed_reason=speed if isinstance(speed, str) else None,
        )


def _rates(figures: MachineFigures | str, config: ModelConfig) -> Rates:
    """Rates of products; without figures those of a usual desktop, on which plans depend little."""
    if isinstance(figures, str):
        gpu = get_gpu("rtx-3060")
        return machine_rates(gpu, get_host(gpu.host), config)
    return machine_rates(figures.gpu, figures.host, config)
