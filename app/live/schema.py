"""The state of the engine that the Engine view draws."""

from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field


class EngineState(StrEnum):
    NO_MODEL = "no-model"  # none is loaded, or one is being loaded
    RESTING = "resting"  # the unused model gave its memory back
    IDLE = "idle"
    WORKING = "working"
    STOPPED = "stopped"  # the engine ended, or failed


class _Json(BaseModel):
    model_config = ConfigDict(frozen=True)


class Cache(_Json):
    total_tokens: int
    used_tokens: int = Field(description="in blocks that requests own")
    leftover_tokens: int = Field(
        description="of ended requests, kept until somebody needs the room: reusable"
    )


class WorkerLine(_Json):
    name: str
    address: str
    total_tokens: int = Field(description="0 while it is lost")
    used_tokens: int
    lost: str | None = Field(description="why it is lost; null: it attends")
    losses: int = Field(description="how often it was lost")


class RequestLine(_Json):
    number: int = Field(description="stays the same for as long as the request lives")
    tier: str = Field(description="gpu, cpu or worker: which cache holds its KV; attention is computed there")
    progress: str = Field(description="prefilling or decoding")
    tokens: int = Field(description="prompt and output so far")
    computed_tokens: int
    is_held: bool = Field(description="it waits for a later iteration, since the CPU has too much to do")


class Batch(_Json):
    requests: int
    gpu_decodes: int
    cpu_decodes: int
    prompts: int
    prompt_tokens: int
    sub_batches: int
    copied_blocks: int = Field(description="KV blocks that moved between the caches")


class RatesView(_Json):
    """Tokens per second over the last seconds."""

    prompt_tokens_per_s: float
    output_tokens_per_s: float
    over_s: float


class LaneSpanView(_Json):
    """A piece of work; times count from the iteration's beginning."""

    stage: str
    layer: int
    sub_batch: int | None
    start_ms: float
    end_ms: float


class LaneView(_Json):
    """A lane, which works in order: device, to-host, cpu, to-device, swap."""

    name: str
    busy: float = Field(description="share of the iteration, 0 to 1")
    spans: list[LaneSpanView]


class TimelineView(_Json):
    """The lanes' busy times in one iteration."""

    total_ms: float
    age_s: float = Field(description="since its end")
    overlap: float | None = Field(
        description="share of CPU attention's time in which the device was busy, too; null: one is missing"
    )
    is_device_recorded: bool = Field(
        description="false: the GPU ran the iteration as one CUDA graph, whose parts are not recorded"
    )
    lanes: list[LaneView]


class PredictionView(_Json):
    """Predicted against real time of the last iterations, the newest last."""

    mean_error: float = Field(description="of the predicted times, relative to the real ones")
    predicted_ms: list[float]
    real_ms: list[float]


class BoundView(_Json):
    """The last iterations' work against the least time that it could have taken on this computer."""

    real_ms: float
    least_ms: float = Field(description="with perfect overlap and nobody waiting")
    share: float = Field(description="least_ms / real_ms")
    gpu_alone_ms: float | None = Field(description="the least with the GPU-cache alone; null: there is none")


class WeightsView(_Json):
    memory: str = Field(description="gpu or host")
    bytes: int
    dtype: str


class Counters(_Json):
    """Since the model was loaded."""

    iterations: int
    double_iterations: int = Field(description="with two sub-batches")
    output_tokens: int
    cpu_decodes: int = Field(description="output tokens whose attention the CPU computed")
    async_decodes: int = Field(description="of these, those computed asynchronously")
    prompt_tokens: int = Field(description="computed or reused")
    cached_tokens: int = Field(description="of these, reused from earlier requests with the same beginning")
    moves: int = Field(description="requests whose KV was moved to another tier")
    preemptions: int = Field(description="requests whose KV was given up and computed again")


class Running(_Json):
    """Everything that there is to say with a model loaded."""

    model: str
    backend: str = Field(description="neo, or llamacpp: then there is nothing to tell of a schedule")
    policy: str
    dtype: str
    device_name: str | None = Field(description="the GPU's; null: none is used")
    is_gpu_imitated: bool
    gpu_sms: int | None = Field(description="the GPU's multiprocessors that are used")
    gpu_cache: Cache | None = Field(description="null: the policy uses none")
    cpu_cache: Cache | None = Field(description="likewise")
    workers: list[WorkerLine]
    requests: list[RequestLine] = Field(description="those that own KV, by arrival")
    waiting: int = Field(description="requests without KV")
    gpu_alone_requests: int | None = Field(
        description="how many of `requests` the GPU-cache alone would hold at most, now; null: there is none"
    )
    batch: Batch | None = Field(description="null: none since somebody looks")
    rates: RatesView | None = Field(description="null: not counted for long enough")
    timeline: TimelineView | None = Field(description="null: no iteration was recorded yet")
    prediction: PredictionView | None = Field(description="null: the policy predicts nothing, or none yet")
    bound: BoundView | None = Field(
        description="null: nothing was measured on this computer, or no iteration yet"
    )
    weights: list[WeightsView]
    counters: Counters


class EngineView(_Json):
    state: EngineState
    sentence: str = Field(description="the same in plain words")
    notes: list[str] = Field(description="what a reader must know beside it")
    age_s: float = Field(description="how old this is: an engine answers between two iterations")
    running: Running | None = Field(description="null: there is no engine to ask")

    @classmethod
    def without_engine(cls, state: EngineState, sentence: str) -> Self:
        """Say why there is nothing to say."""
        return cls(state=state, sentence=sentence, notes=[], age_s=0.0, running=None)
