"""The engine: requests go in at any time, every step brings some tokens out."""

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, cast

import torch

from neo_desktop.engine.batch import FloatArray
from neo_desktop.engine.detokenizer import IncrementalText
from neo_desktop.engine.doctor.first_start import check_at_first_start
from neo_desktop.engine.doctor.safe_start import safe_start
from neo_desktop.engine.doctor.trials import Subject
from neo_desktop.engine.execute.build import build_executor
from neo_desktop.engine.execute.executor import Executor
from neo_desktop.engine.execute.ranks.driver import DriverExecutor
from neo_desktop.engine.execute.timeline import Timeline
from neo_desktop.engine.generate import Completion, embed, generate
from neo_desktop.engine.grammar import GrammarCompiler
from neo_desktop.engine.host_reserve import HostReserve, reserve_bytes
from neo_desktop.engine.input_processor import InputProcessor, PreparedRequest, Prompt
from neo_desktop.engine.iterations import Iterations
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.live import LiveView, Notes
from neo_desktop.engine.loading import LoadedModel, choose_device
from neo_desktop.engine.options import BUILTIN, EngineKeywords, EngineOptions
from neo_desktop.engine.parts import MEASURING, EngineParts, set_up
from neo_desktop.engine.predict.corrected import CorrectedCostModel
from neo_desktop.engine.predict.cost_model import CostModel, TableCostModel
from neo_desktop.engine.profiling.profile_cache import load_or_profile
from neo_desktop.engine.profiling.workers import measured_workers
from neo_desktop.engine.progress import Progress, part
from neo_desktop.engine.remote.workers import Workers
from neo_desktop.engine.request import Request, RequestOutput
from neo_desktop.engine.sampling_params import Pooling, SamplingParams
from neo_desktop.engine.schedule.policies import get_policy
from neo_desktop.engine.schedule.scheduler import Scheduler
from neo_desktop.engine.stats import EngineStats
from neo_desktop.models.config import GenerationDefaults

logger = logging.getLogger(__name__)

WEIGHTS_SHARE = 0.5  # of the progress of loading; the rest is for measuring, which only the first start needs


class Engine:
    """Continuous batching over one model.

    Not thread-safe: one thread makes the engine's calls (`app.service` owns such a thread).

    Use `from_pretrained` to make one; the constructor takes parts, so that tests can put in fake ones.
    """

    def __init__(
        self,
        model: LoadedModel,
        scheduler: Scheduler,
        kv_cache: KVCache,
        executor: Executor,
        policy: str,
        cost_model: CorrectedCostModel | None = None,
        timeline: Timeline | None = None,
        workers: Workers | None = None,
        reserve: HostReserve | None = None,
    ) -> None:
        self.model_name = model.name
        self.config = model.config
        self.tokenizer = model.tokenizer
        self.max_context_tokens = min(model.config.max_context_tokens, scheduler.max_context_tokens)
        self.input_processor = InputProcessor(
            model.tokenizer, model.config.vocab_size, self.max_context_tokens, kv_cache.block_size
        )
        self.eos_token_ids = model.config.eos_token_ids or model.tokenizer.eos_token_ids
        # Any thread may use it: before a request is added, so that compiling holds nobody up.
        self.grammars = GrammarCompiler(model.tokenizer, model.config.vocab_size, self.eos_token_ids)
        self.streams = model.streams
        self._decoder = model.decoder
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._policy = policy
        self._cost_model = cost_model
        self._notes = Notes(timeline)
        self._workers = workers
        self._iterations = Iterations(scheduler, executor, cost_model, self._notes, workers, reserve)
        self._arrivals = itertools.count(1)
        self._first_asked_s: float | None = None  # when the first request came
        self._has_answered = False

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = BUILTIN,
        *,
        cost_model: CostModel | None = None,
        progress: Progress | None = None,
        **options: Unpack[EngineKeywords],
    ) -> Self:
        """Load a model and get the memory for its KV cache.

        Args:
            model: a folder with a Hugging Face checkpoint, or "builtin".
            options: the fields of `EngineOptions`, which say what they mean and have the defaults.
            cost_model: see `from_options`.
            progress: likewise.

        Raises:
            ModelError: the checkpoint cannot be used.
            ValueError: an option is out of range or names something unknown.
            RuntimeError: the GPU cannot be cut into slices.
            MemoryError: weights or caches do not fit.
        """
        return cls.from_options(EngineOptions(model=model, **cast("Any", options)), cost_model, progress)

    @classmethod
    def from_options(
        cls,
        options: EngineOptions,
        cost_model: CostModel | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Do as `from_pretrained` does, which says what is raised.

        Args:
            options: what the engine is made from.
            cost_model: what the scheduler predicts with; None: measured on this computer at the first start
                with this model, and kept on disk.
            progress: told how far the loading is, and the measuring.
        """
        # Known before anything is loaded: what works here, and that a start ended the process before.
        device = choose_device(options.device)
        check_at_first_start(Subject.of(options, is_quick=True), device, part(progress, 0.0, 0.0, MEASURING))
        with safe_start(device):
            parts = set_up(options, part(progress, 0.0, WEIGHTS_SHARE))
            timeline = None if options.trace_timeline is None else Timeline(options.trace_timeline)
            measured = part(progress, WEIGHTS_SHARE, 1.0, MEASURING)
            try:
                return cls.from_parts(
                    parts,
                    options.policy,
                    cost_model=cost_model,
                    timeline=timeline,
                    progress=measured,
                    host_reserve_bytes=reserve_bytes(options),
                )
            except BaseException:
                if parts.leader is not None:
                    parts.leader.close()
                if parts.workers is not None:
                    parts.workers.close()
                raise

    @classmethod
    def from_parts(
        cls,
        parts: EngineParts,
        policy: str,
        *,
        cost_model: CostModel | None = None,
        timeline: Timeline | None = None,
        progress: Progress | None = None,
        host_reserve_bytes: int | None = None,
    ) -> Self:
        """Make an engine of a loaded model and the memory of all tiers that the policy uses.

        `close` drops them from the engine; the memory is free when nobody else refers to the parts.
        See `from_options` for the arguments; ValueError: the policy is unknown.

        Args:
            host_reserve_bytes: what caches leave to other programs, see `HostReserve`; None: nothing is
                given back.
        """
        chosen_policy = get_policy(policy).with_tiers(tier for tier in parts.num_blocks if tier.is_remote)
        decoder, limits, storage = parts.model.decoder, parts.limits, parts.storage
        streams = parts.model.streams
        kv_cache = KVCache(parts.num_blocks, BLOCK_SIZE)
        # With a single tier to live nothing has to be predicted; but weights in host memory are divided.
        predicts = chosen_policy.needs_predictions and sum(map(bool, parts.num_blocks.values())) > 1
        predicts = predicts or (chosen_policy.needs_predictions and parts.workers is not None)
        if cost_model is None and (predicts or decoder.has_splits):
            cost_model = load_or_profile(decoder, storage, limits, progress, streams=streams)
        if parts.workers is not None and isinstance(cost_model, TableCostModel):
            cost_model = cost_model.with_attention(*measured_workers(storage, decoder))
        # Without a trace, single iterations are recorded for those who look.
        timeline = timeline or Timeline(max_spans=0, is_continuous=False)
        leader = parts.leader
        group = None if leader is None else leader.group
        own = build_executor(
            decoder, storage, limits.max_batch_tokens, limits.max_batch_requests, timeline, streams, group
        )
        if leader is not None:
            leader.check_ready()
        executor = own if leader is None else DriverExecutor(own, leader)
        corrected = None if cost_model is None else CorrectedCostModel(cost_model)
        scheduler = Scheduler(kv_cache, chosen_policy, limits, corrected, decoder.config.num_layers)
        reserve = None
        if host_reserve_bytes is not None:
            reserve = HostReserve(scheduler, kv_cache, storage, host_reserve_bytes)
        return cls(
            parts.model, scheduler, kv_cache, executor, policy, corrected, timeline, parts.workers, reserve
        )

    @property
    def sampling_defaults(self) -> GenerationDefaults:
        """What the model's makers recommend."""
        return self.config.generation

    @property
    def note(self) -> str | None:
        """What the owner of the computer should know."""
        return self.streams.note

    @property
    def gpu_bytes(self) -> int:
        """What it took of the GPU's memory."""
        return torch.cuda.memory_reserved() if self.streams.device.type == "cuda" else 0

    @property
    def has_requests(self) -> bool:
        """Whether any request has not ended."""
        return self._scheduler.num_waiting + self._scheduler.num_running > 0

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, an iteration has not, or outputs have not been taken."""
        return self.has_requests or self._iterations.has_more

    def prepare(
        self, prompt: Prompt, params: SamplingParams, *, add_special_tokens: bool = True
    ) -> PreparedRequest:
        """Check a prompt and make everything ready that `add` needs; any thread may.

        Raises:
            see `InputProcessor.prepare`; SettingError: the grammar cannot be used.
        """
        prepared = self.input_processor.prepare(prompt, params, add_special_tokens=add_special_tokens)
        if params.grammar is not None:
            self.grammars.compile(params.grammar)
        return prepared

    def add(self, request_id: str, prepared: PreparedRequest) -> None:
        """Queue a request; its n outputs are told apart by their `choice`."""
        if self._first_asked_s is None:
            self._first_asked_s = time.perf_counter()
        for request in new_requests(
            request_id, prepared, self.input_processor, self.eos_token_ids, self.grammars, self._arrivals
        ):
            self._scheduler.add(request)

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request now and free its memory; return the last of its outputs, if it was still there."""
        return self._scheduler.abort(request_id)

    def watch(self, alarm: Callable[[], object]) -> None:
        """Have something called, by any thread, when `check` would raise though nobody asks anything."""
        self._iterations.executor.watch(alarm)

    def check(self) -> None:
        """Raise RuntimeError if it is known that nothing can be computed in this process any more."""
        if (loss := self._iterations.executor.loss) is not None:
            raise loss

    def rest(self) -> bool:
        """Do what is to be done now and then while there is no work; return whether figures have changed."""
        return self._iterations.rest()

    def step(self) -> list[RequestOutput]:
        """Wait for an iteration and start the next one; return what each request gained by the first.

        Raises:
            RuntimeError: the GPU or a thread is lost to this process, so that the engine cannot be used any
                more (see `is_lost`). Other failures end the requests concerned.
        """
        self.collect()
        self.launch()
        return self.take_outputs()

    def collect(self) -> None:
        """Wait for the iteration under way, or else for one that starts now, and take its tokens in."""
        self._iterations.collect()

    def launch(self) -> None:
        """Plan the next iteration, of all requests that are there now, and start it, if there is work."""
        self._iterations.launch()

    def take_outputs(self) -> list[RequestOutput]:
        """Return what requests gained since the last call; best while an iteration is under way."""
        outputs = self._iterations.take_outputs()
        if not self._has_answered and self._first_asked_s is not None and any(o.tokens for o in outputs):
            self._has_answered = True
            seconds = time.perf_counter() - self._first_asked_s
            logger.info("%s: the first token came %.2f s after the first request", self.model_name, seconds)
        return outputs

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete all prompts together.

        Args:
            prompts: texts or token ids.
            params: one for all prompts or one for each.

        Returns:
            The outputs in the order of the prompts; with `n` above 1, the n outputs of a prompt in a row.

        Raises:
            ValueError: a prompt or a setting cannot be used; nothing is run then.
            EngineError: the engine had to give a request up.
        """
        return generate(self, prompts, params)

    def embed(self, prompts: Sequence[Prompt], pooling: Pooling = "mean") -> list[FloatArray]:
        """Return what the model makes of each prompt: hidden states after the final norm, of length 1.

        Args:
            prompts: texts or token ids.
            pooling: the mean of all tokens, or the last one.

        Returns:
            One array [hidden] per prompt.

        Raises:
            ValueError: a prompt cannot be used; nothing is run then.
            EngineError: the engine had to give a request up.
        """
        return embed(self, prompts, pooling)

    def stats(self) -> EngineStats:
        """Return a snapshot of what the engine holds and has done."""
        counters = self._scheduler.counters
        return EngineStats(
            model=self.model_name,
            policy=self._policy,
            device=self._decoder.device.type,
            dtype=str(self._decoder.dtype).removeprefix("torch."),
            gpu_sms=self.streams.sms,
            max_context_tokens=self.max_context_tokens,
            block_size=self._kv_cache.block_size,
            num_running=self._scheduler.num_running,
            num_running_at=self._scheduler.num_running_at,
            num_waiting=self._scheduler.num_waiting,
            num_iterations=self._iterations.num_started,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_cached_tokens=counters.num_cached_tokens,
            num_output_tokens=counters.num_output_tokens,
            num_preemptions=counters.num_preemptions,
            num_moves=counters.num_moves,
            num_cpu_decodes=counters.num_cpu_decodes,
            num_async_decodes=counters.num_async_decodes,
            num_double_iterations=counters.num_double_iterations,
            outside_s=self._iterations.outside_s,
            pools=self._kv_cache.usage(),
        )

    def live_view(self) -> LiveView:
        """Return what the engine does right now, for people; once a second is often enough.

        For some seconds from then on notes about iterations are taken, which the next view tells of.
        """
        self._notes.ask()
        weights_bytes = self._decoder.nbytes
        cost_model = None if self._cost_model is None else self._cost_model.base
        running, device = self._scheduler.running, self._decoder.device
        async_case_engine = self._scheduler.async_case_engine
        workers = None if self._workers is None else self._workers.states
        return LiveView.of(
            self.stats(), running, self._notes, device, weights_bytes, cost_model, async_case_engine, workers
        )

    def close(self) -> None:
        """End all threads, drop weights and caches; nothing can be generated afterwards."""
        if "_decoder" in vars(self):
            del self._decoder
            self._iterations.close()
            if self._workers is not None:
                self._workers.close()
            self.grammars.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def new_requests(
    request_id: str,
    prepared: PreparedRequest,
    input_processor: InputProcessor,
    eos_token_ids: tuple[int, ...],
    grammars: GrammarCompiler,
    arrivals: Iterator[int],
) -> Iterator[Request]:
    """Yield the n requests of a prompt, told apart by their `choice`."""
    params = prepared.params
    seed = secrets.randbits(63) if params.seed is None else params.seed
    for choice in range(params.n):
        yield Request(
            request_id,
            prepared.token_ids,
            params,
            choice=choice,
            seed=seed,
            arrival=next(arrivals),
            max_context_tokens=input_processor.max_context_tokens,
            eos_token_ids=eos_token_ids,
            text=IncrementalText(
                input_processor.tokenizer.decode_stream(is_chat=params.thoughts is not None),
                params.stop,
                params.thoughts,
            ),
            grammar=None if params.grammar is None else grammars.start(params.grammar, params.grammar_after),
            block_hashes=prepared.block_hashes,
        )
