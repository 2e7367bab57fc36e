"""Weight placement: one memory plan for weights and KV.

    GPU memory                                                    host memory
    | others | resident weights | streaming | KV | iteration | reserve |   | others | other weights | KV ... |

If all weights fit beside the iteration and a little KV, they are all resident. Otherwise plans compete that
have room on the GPU for the KV of 4,096 tokens, of 8,192, and so on. The KV of longer chats is in host
memory. The highest predicted speed wins, on average over chats of these lengths. A chat of 4,096 tokens must
lose little. Then recurrent states get memory of further weights, as much as slows each chat little.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from neo_desktop.engine.execute.weight_stream import streaming_bytes
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.kv.layout import in_whole_runs
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.options import GIB, EngineOptions
from neo_desktop.engine.predict.expert_places import move_budget
from neo_desktop.engine.predict.offloaded_matmul import Rates
from neo_desktop.engine.predict.weight_plan import (
    WeightPlan,
    layer_matrices,
    plan_weights,
    slotted_experts,
    weight_times,
)
from neo_desktop.engine.profiling.budget import (
    DEVICE_RESERVE_BYTES,
    HOST_SHARE,
    MOST_HOST_SHARE,
    STATES_SHARE,
    STREAMED_SHARE,
    FreeMemory,
    activation_bytes,
    chat_lengths,
    host_buffer_bytes,
    limits_of,
    most_slots,
    num_slots,
    other_programs,
)
from neo_desktop.engine.schedule.policies import get_policy
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.stored_form import uniform_form

# Limits for copies of experts on the GPU: a share of the host memory that is left, and a multiple of the
# other experts' memory. With few others, little can be gained.
MOST_COPIES, COPIES_PER_OTHER = 0.5, 3
MOST_LOSS = 0.11  # most speed that a usual chat loses to longer ones; less with fixed times
MOST_STATES_LOSS = 0.02  # most speed that a chat loses to further slots for states
SHORT_TOKENS = 1000  # context that is too short to be useful
# GGUF file suffix -> dominant tensor type
QUANTISATIONS = {"Q8_0": "Q8_0", "Q6_K": "Q6_K", "Q5_K_M": "Q5_K", "Q4_K_M": "Q4_K", "Q4_0": "Q4_0"}


def plan_memory(
    config: ModelConfig,
    form: WeightFormat,
    dtype: torch.dtype,
    device: torch.device,
    options: EngineOptions,
    rates: Callable[[], Rates],
    free: FreeMemory | None = None,
) -> WeightPlan | None:
    """Plan the placement of a model's weights before loading; None: all are on the compute device.

    Args:
        form: weight format on that device.
        rates: returns the rates of this machine; called only if needed.
        free: free memory without a model; None: query it.

    Raises:
        MemoryError: the weights do not fit; the message suggests remedies.
    """
    free = free or FreeMemory.now(device)
    weights = config.weight_bytes(dtype, form)
    forced = None if options.gpu_weights_gib is None else int(options.gpu_weights_gib * GIB)
    # Copies from pageable memory would block the engine's thread.
    is_pinned = device.type == "cpu" or fallbacks.level("host_memory") == "pinned"
    may_move = options.move_experts == "auto" and is_pinned
    if free.gpu_bytes is None:  # no GPU: all memory is host memory
        check_weights_fit(config, dtype, device, options, free, form)
        if forced is None or forced >= weights:
            return None
        placed = plan_weights(config, form, dtype, forced, rates())
        room = free.host_bytes - weights
        return _with_moves(placed, config, form, dtype, rates(), room) if may_move else placed
    memory = _Memory(config, form, dtype, device, options, rates, free)
    if forced is None:
        plan = memory.best_plan()
    elif forced >= weights:
        plan = None
    else:
        plan = memory.forced_plan(forced)
    if plan is None or not plan.is_split:
        check_weights_fit(config, dtype, device, options, free, form)
        return None
    room = memory.check_host(plan)
    return _with_moves(plan, config, form, dtype, memory.rates, room) if may_move else plan


def _with_moves(
    plan: WeightPlan, config: ModelConfig, form: WeightFormat, dtype: torch.dtype, rates: Rates, room: int
) -> WeightPlan:
    """Let experts move, if that can pay and if host memory has room for copies of experts on the device.

    Args:
        room: bytes of host memory beside the plan's.
    """
    experts = slotted_experts(config, form, layer_matrices(config, form, dtype), plan)
    copies = sum(sizes.host_bytes * resident // sizes.rows for sizes, resident in experts)
    others = sum(sizes.host_bytes for sizes, _ in experts) - copies
    if not experts or copies > min(room * MOST_COPIES, others * COPIES_PER_OTHER):
        return plan
    budget = move_budget(rates, experts)
    if budget.most < max(sizes.host_bytes / sizes.rows for sizes, _ in experts):
        return plan
    return replace(plan, host_bytes=plan.host_bytes + copies, moves=budget)


class _Memory:
    """Available memory and its plans; see `plan_memory`."""

    def __init__(
        self,
        config: ModelConfig,
        form: WeightFormat,
        dtype: torch.dtype,
        device: torch.device,
        options: EngineOptions,
        rates: Callable[[], Rates],
        free: FreeMemory,
    ) -> None:
        self._config, self._form, self._dtype = config, form, dtype
        self._options, self._find_rates = options, rates
        self._limits = limits = limits_of(options, device)
        cap = options.gpu_memory_bytes
        assert free.gpu_bytes is not None
        self._gpu_bytes = free.gpu_bytes if cap is None else min(free.gpu_bytes, cap)
        self._iteration_bytes = activation_bytes(config, limits, dtype, device) + DEVICE_RESERVE_BYTES
        self._buffers = host_buffer_bytes(config, limits, dtype)
        self._host_bytes = free.host_bytes
        self._short_tokens = min(SHORT_TOKENS, config.max_context_tokens)
        self._weights, self._tables = config.weight_bytes(dtype, form), config.table_bytes(dtype, form)
        self._tiers = get_policy(options.policy).tiers
        self._matrices = layer_matrices(config, form, dtype)
        self._always = self._weights - sum(sizes.device_bytes for sizes in self._matrices.values())
        self._streaming = streaming_bytes(self._matrices)
        self._chats = chat_lengths(config)  # from the usual one on, in tokens
        self._token_bytes = config.kv_bytes_per_token(dtype)

    @cached_property
    def rates(self) -> Rates:
        return self._find_rates()

    def best_plan(self) -> WeightPlan | None:
        """Return the best plan for chats, see above; None: all weights fit."""
        if self._weights <= self._room(self._least_tokens):
            return None
        plans = [self._beside(tokens) for tokens in self._device_tokens]
        # Plans with the speeds of chats. If host memory has room for none, the first one is refused later.
        found = [
            (plan, self._speeds(plan, tokens))
            for plan, tokens in zip(plans, self._device_tokens, strict=True)
            if self._host_room(plan) >= 0
        ]
        if not found:
            return plans[0]
        best: list[float] = [max(speeds) for speeds in zip(*(speeds for _, speeds in found), strict=True)]

        def worth(speeds: Sequence[float]) -> float:
            """Return the sum of the speeds relative to the best; 0: a usual chat loses too much."""
            if speeds[0] < (1 - MOST_LOSS) * best[0]:
                return 0.0
            return sum(speed / most for speed, most in zip(speeds, best, strict=True) if most)

        return self._with_more_slots(*max(found, key=lambda each: worth(each[1])))

    def _beside(self, device_tokens: int, slots: int = 0) -> WeightPlan:
        """Return the plan beside the KV of that many tokens; see `_room`."""
        plan = self._planned(self._room(device_tokens, slots) - self._streaming)
        return replace(plan, device_tokens=device_tokens)

    def _with_more_slots(self, plan: WeightPlan, speeds: Sequence[float]) -> WeightPlan:
        """Return the plan with the most slots for states that slow no chat by more than a little.

        Args:
            speeds: of the plan, see `_speeds`.
        """
        tokens = plan.device_tokens
        assert tokens is not None
        if not self._config.state_bytes:
            return plan

        def is_too_much(slots: int) -> bool:
            if self._room(tokens, slots) - self._streaming < self._always:
                return True
            more = self._beside(tokens, slots)
            slower = zip(self._speeds(more, tokens), speeds, strict=True)
            return self._host_room(more) < 0 or any(
                speed < (1 - MOST_STATES_LOSS) * before for speed, before in slower
            )

        counts = range(1, most_slots(self._limits) + 1)
        return self._beside(tokens, bisect_left(counts, True, key=is_too_much))

    def forced_plan(self, gpu_bytes: int) -> WeightPlan:
        """Return the plan with at most `gpu_bytes` of weights on the GPU."""
        most = self._room(self._least_tokens) - self._streaming
        if gpu_bytes > most:
            raise MemoryError(
                f"{gpu_bytes / GIB:.2f} GiB of weights were requested for GPU memory, but beside iterations "
                f"and KV it has room for {max(most, 0) / GIB:.2f} GiB: request less, or omit the option to "
                "use the fastest placement as predicted"
            )
        return self._planned(gpu_bytes)

    def check_host(self, plan: WeightPlan) -> int:
        """Return the bytes of host memory that the other weights leave, and some KV if it is to store KV.

        Raises MemoryError if they do not fit.
        """
        room = self._host_room(plan)
        if room < 0:
            free = int(self._host_bytes * MOST_HOST_SHARE)
            on_host = plan.host_bytes + self._tables
            rest = room + on_host
            smaller = self._smaller(self._room(self._least_tokens) - self._streaming + rest)
            raise MemoryError(
                f"of {(self._weights + self._tables) / 1e9:.1f} GB of weights, GPU memory has room for "
                f"{plan.gpu_bytes / 1e9:.1f} GB, and the other {on_host / 1e9:.1f} GB and KV do not fit into "
                f"the {free / 1e9:.1f} GB of host memory that may be taken: {smaller}close other "
                "programs or choose a smaller model"
            )
        return room

    def _host_room(self, plan: WeightPlan) -> int:
        """Return the bytes of host memory that the plan and some KV leave."""
        room = int(self._host_bytes * MOST_HOST_SHARE) - plan.host_bytes - self._tables
        if any(tier.host_attends for tier in self._tiers):
            room -= self._short_tokens * self._token_bytes + self._buffers
        return room

    def _smaller(self, room: int) -> str:
        """Suggest a quantisation that GPU and host memory hold together, as the start of a sentence."""
        for name, type_name in QUANTISATIONS.items():
            weights = self._config.weight_bytes(self._dtype, uniform_form(self._config, type_name))
            if weights < min(room, self._weights):
                return f"a GGUF file of it in {name} would fit (about {weights / 1e9:.1f} GB); or "
        return ""

    def _planned(self, gpu_bytes: int) -> WeightPlan:
        return plan_weights(self._config, self._form, self._dtype, gpu_bytes, self.rates)

    @cached_property
    def _least_tokens(self) -> int:
        """The least number of tokens whose KV has room on the GPU."""
        if all(tier.in_host_memory for tier in self._tiers):
            return 0
        asked = self._options.gpu_cache_tokens
        return self._short_tokens if asked is None else asked

    @cached_property
    def _device_tokens(self) -> list[int]:
        """The numbers of tokens whose KV plans have room for on the GPU, the smallest first."""
        if self._options.gpu_cache_tokens is not None or not self._least_tokens:
            return [self._least_tokens]
        fitting = [tokens for tokens in self._chats if self._room(tokens) - self._streaming >= self._always]
        return fitting or [self._least_tokens]

    def _room(self, device_tokens: int, slots: int = 0) -> int:
        """Return the GPU memory for weights beside iterations, this KV, and at least `slots` for states."""
        kv = in_whole_runs(device_tokens) * self._token_bytes
        if any(tier.is_streamed for tier in self._tiers) and not any(
            tier.host_attends for tier in self._tiers
        ):
            kv = int(kv / (1 - STREAMED_SHARE))  # the prefetch buffer
            decodes = 2 * self._limits.max_batch_requests  # until their KV is in host memory
            kv += decodes * self._token_bytes
        others = self._iteration_bytes + kv
        share = STATES_SHARE / (1 - STATES_SHARE) * others
        slots = max(slots, num_slots(self._config, self._limits, share, 0, 0))
        return self._gpu_bytes - others - slots * self._config.state_bytes

    def _speeds(self, plan: WeightPlan, device_tokens: int) -> list[float]:
        """Return the output tokens per ms of one chat, for all `_chats`, without fixed times; 0: no room.

        Args:
            device_tokens: longer chats have their KV in host memory.
        """
        ms = weight_times(self._matrices, plan, self.rates, 1).ms
        return [
            max(
                (
                    1 / (ms + self._attention_ms(tier, tokens))
                    for tier in self._tiers
                    if tier.in_host_memory or tokens <= device_tokens
                ),
                default=0.0,
            )
            for tokens in self._chats
        ]

    def _attention_ms(self, tier: KVTier, tokens: int) -> float:
        """Return the time to read a chat's KV per output token."""
        nbytes = self._config.attended_tokens(tokens) * self._token_bytes
        if tier.is_streamed:
            return 1e3 * nbytes / self.rates.bus_bytes_per_s
        if not tier.host_attends:
            return 1e3 * nbytes / self.rates.gpu_bytes_per_s
        offloads_ms = self._config.num_layers * self.rates.offload_ms
        return 1e3 * nbytes / self.rates.cpu_bytes_per_s + offloads_ms


def check_weights_fit(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    options: EngineOptions,
    free: FreeMemory,
    form: WeightFormat = DENSE,
) -> None:
    """Check that the weights fit, before they are loaded.

    Raises:
        MemoryError: the weights exceed the free memory or the cap.
    """
    needed = config.loading_bytes(dtype, device, form)
    is_gpu = device.type == "cuda"
    room, cap = free.device_bytes, options.gpu_memory_bytes
    where = "GPU" if is_gpu else "host"
    if needed > room:
        raise MemoryError(
            f"loading the weights takes {needed / 1e9:.1f} GB in {dtype}, but only {room / 1e9:.1f} GB of "
            f"{where} memory are free{other_programs() if is_gpu else ''}: "
            f"{smaller_form(config, dtype, device, room, needed)}close other programs, choose a 16-bit dtype "
            "or a smaller model"
        )
    if is_gpu and cap is not None and needed > cap:
        raise MemoryError(
            f"the weights take {needed / GIB:.1f} GiB in {dtype}, but GPU memory is capped at "
            f"{cap / GIB:.1f} GiB: {smaller_form(config, dtype, device, cap, needed)}"
            "raise the cap, choose a 16-bit dtype or a smaller model"
        )


def smaller_form(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, free: int, needed: int
) -> str:
    """Suggest a quantisation that leaves room for chats, as the start of a sentence; "": none does.

    Args:
        free: bytes for weights and KV.
        needed: bytes of the model without further quantisation.
    """
    if device.type == "cuda" and fallbacks.level("quantised") == "torch":
        return ""
    for name, type_name in QUANTISATIONS.items():
        form = uniform_form(config, type_name)
        bytes_ = config.loading_bytes(dtype, device, form if device.type == "cpu" else form.on_gpu(dispatch))
        left = free - bytes_
        room = (
            left - DEVICE_RESERVE_BYTES if device.type == "cuda" else left * HOST_SHARE / len(MEASURED_TIERS)
        )
        tokens = int(min(room // config.kv_bytes_per_token(dtype), config.max_context_tokens))
        if bytes_ < needed and tokens >= min(SHORT_TOKENS, config.max_context_tokens):
            return (
                f"a GGUF file of it in {name} would fit (about {bytes_ / 1e9:.1f} GB, and chats of up to "
                f"{tokens // 100 * 100:,} tokens); or "
            )
    return ""
