"""The engine: it accepts requests at any time, and every step returns new tokens."""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, cast

import torch

from neo_desktop.engine.batch import FloatArray
from neo_desktop.engine.doctor.first_start import check_at_first_start
from neo_desktop.engine.doctor.trials import Subject
from neo_desktop.engine.errors import EngineError
from neo_desktop.engine.execute.executor import Executor
from neo_desktop.engine.execute.timeline import Timeline
from neo_desktop.engine.generate import Completion, new_requests
from neo_desktop.engine.grammar import GrammarCompiler
from neo_desktop.engine.host_reserve import HostReserve, reserve_bytes
from neo_desktop.engine.input_processor import InputProcessor, PreparedRequest, Prompt
from neo_desktop.engine.iterations import Iterations
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv.disk import DiskCounters
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.live import LiveView, Notes, live_requests, num_fitting
from neo_desktop.engine.loading import LoadedModel, choose_device
from neo_desktop.engine.options import BUILTIN, EngineOptions
from neo_desktop.engine.predict.corrected import CorrectedCostModel
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.progress import Progress, part
from neo_desktop.engine.remote.workers import Workers
from neo_desktop.engine.request import Request, RequestOutput
from neo_desktop.engine.sampling_params import Pooling, SamplingParams
from neo_desktop.engine.schedule.policies import get_policy
from neo_desktop.engine.schedule.scheduler import Scheduler
from neo_desktop.engine.schedule.speculation import Speculation
from neo_desktop.engine.setup import (
    MEASURING,
    EngineParts,
    cost_model_of,
    disk_cache_of,
    disk_folder,
    executor_of,
    set_up,
)
from neo_desktop.engine.stats import EngineStats

logger = logging.getLogger(__name__)

WEIGHTS_SHARE = 0.5  # share of the loading progress; the rest is profiling, which only the first start needs


class Engine(Iterations):
    """Continuous batching over one model.

    Not thread-safe: one thread makes the engine's calls (`app.engines.service` owns a suitable thread).

    Use `from_pretrained` to make an engine; the constructor takes parts, so that tests can use fakes.
    """

    def __init__(
        self,
        model: LoadedModel,
        scheduler: Scheduler[Request],
        kv_cache: KVCache,
        executor: Executor,
        policy: str,
        cost_model: CorrectedCostModel | None = None,
        timeline: Timeline | None = None,
        workers: Workers | None = None,
        reserve: HostReserve | None = None,
    ) -> None:
        super().__init__(scheduler, executor, cost_model, Notes(timeline), workers, reserve, kv_cache.disk)
        self.model_name = model.name
        self.config = model.config
        self.tokenizer = model.tokenizer
        self.max_context_tokens = min(model.config.max_context_tokens, scheduler.queues.max_context_tokens)
        self.input_processor = InputProcessor(
            model.tokenizer, model.config.vocab_size, self.max_context_tokens, kv_cache.block_size
        )
        self.eos_token_ids = model.config.eos_token_ids or model.tokenizer.eos_token_ids
        # Thread-safe. Callers compile before they add a request, so that compilation delays no iteration.
        self.grammars = GrammarCompiler(model.tokenizer, model.config.vocab_size, self.eos_token_ids)
        self.streams = model.streams
        self.note = model.streams.note  # for the user, about the GPU partition
        self.sampling_defaults = model.config.generation  # that the model's authors recommend
        self.vision, self.blindness = model.vision, model.blindness
        self._decoder = model.decoder
        self._kv_cache = kv_cache
        self._policy = policy
        self._resources = ExitStack()  # closes workers and other ranks
        self._arrivals = itertools.count(1)
        self._first_asked_s: float | None = None  # arrival of the first request
        self._has_answered = False

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = BUILTIN,
        *,
        cost_model: TableCostModel | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> Self:
        """Load a model and allocate its KV cache.

        Args:
            model: a folder with a Hugging Face checkpoint, a GGUF file, or "builtin".
            cost_model: see `from_options`.
            options: the fields of `EngineOptions`, which documents them.

        Raises:
            ModelError: the checkpoint cannot be used.
            ValueError: an option is out of range or names something unknown.
            RuntimeError: the GPU cannot be partitioned.
            MemoryError: weights or caches do not fit.
        """
        return cls.from_options(EngineOptions(model=model, **options), cost_model, progress)

    @classmethod
    def from_options(
        cls,
        options: EngineOptions,
        cost_model: TableCostModel | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Make an engine from options; `from_pretrained` lists the errors raised.

        Args:
            cost_model: of the scheduler; None: measured on this computer at the first start with this model,
                and cached on disk.
        """
        # Before loading, find out what works here.
        device = choose_device(options.device)
        check_at_first_start(Subject.of(options, is_quick=True), device, part(progress, 0.0, 0.0, MEASURING))
        return cls.from_parts(
            set_up(options, part(progress, 0.0, WEIGHTS_SHARE)),
            options.policy,
            cost_model=cost_model,
            timeline=None if options.trace_timeline is None else Timeline(options.trace_timeline),
            progress=part(progress, WEIGHTS_SHARE, 1.0, MEASURING),
            host_reserve_bytes=reserve_bytes(options),
            disk_cache=disk_folder(options),
        )

    @classmethod
    def from_parts(
        cls,
        parts: EngineParts,
        policy: str,
        *,
        cost_model: TableCostModel | None = None,
        timeline: Timeline | None = None,
        progress: Progress | None = None,
        host_reserve_bytes: int | None = None,
        disk_cache: tuple[Path, int] | None = None,
    ) -> Self:
        """Make an engine from a loaded model and the memory for the policy's tiers.

        `close` releases the engine's references; the memory is free once no others exist.

        Args:
            host_reserve_bytes: host memory left to other programs; None: the caches keep all.
            disk_cache: folder for KV that leaves the caches, and its limit in bytes; None: that KV is lost.
        """
        with ExitStack() as resources:
            resources.push(parts.resources)
            chosen_policy = get_policy(policy).with_tiers(tier for tier in parts.num_blocks if tier.is_remote)
            corrected = cost_model_of(parts, chosen_policy, cost_model, progress)
            # Without a trace file, the timeline records single iterations for live views.
            timeline = timeline or Timeline(max_spans=0, is_continuous=False)
            executor = executor_of(parts, timeline)
            kv_cache = KVCache(parts.num_blocks, BLOCK_SIZE, parts.storage.num_states)
            if disk_cache is not None:
                kv_cache.disk = disk_cache_of(parts, kv_cache, corrected, disk_cache)
            if parts.drafter is not None:
                parts.drafter.read_from(kv_cache, parts.storage)
            num_layers = parts.model.config.num_layers
            scheduler: Scheduler[Request] = Scheduler(
                kv_cache,
                chosen_policy,
                parts.limits,
                corrected,
                num_layers,
                Speculation.of(parts.speculate, corrected, parts.limits.max_batch_requests, parts.drafter),
            )
            reserve = None
            if host_reserve_bytes is not None:
                reserve = HostReserve(scheduler, kv_cache, parts.storage, host_reserve_bytes)
            engine = cls(
                parts.model,
                scheduler,
                kv_cache,
                executor,
                policy,
                corrected,
                timeline,
                parts.workers,
                reserve,
            )
            engine._resources = resources.pop_all()
            return engine

    @property
    def gpu_bytes(self) -> int:
        return torch.cuda.memory_reserved() if self.streams.device.type == "cuda" else 0

    @property
    def has_requests(self) -> bool:
        return any(True for _ in self._scheduler.queues)

    @property
    def has_work(self) -> bool:
        """True if a request or an iteration has not finished, or outputs have not been taken."""
        return self.has_requests or self.has_more

    def prepare(
        self, prompt: Prompt, params: SamplingParams, *, add_special_tokens: bool = True
    ) -> PreparedRequest:
        """Check a prompt and prepare it for `add`; thread-safe.

        Raises:
            SettingError: the grammar cannot be used.
            ValueError: see `InputProcessor.prepare`.
        """
        prepared = self.input_processor.prepare(prompt, params, add_special_tokens=add_special_tokens)
        if params.grammar is not None:
            self.grammars.compile(params.grammar)
        return prepared

    def add(self, request_id: str, prepared: PreparedRequest) -> None:
        """Queue a request; `choice` distinguishes its n outputs."""
        if self._first_asked_s is None:
            self._first_asked_s = time.perf_counter()
        for request in new_requests(
            request_id, prepared, self.input_processor, self.eos_token_ids, self.grammars, self._arrivals
        ):
            self._scheduler.add(request)

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request now and free its memory; return its last outputs, if it was still running."""
        return self._scheduler.abort(request_id)

    def watch(self, alarm: Callable[[], object]) -> None:
        """Register a callback, which any thread calls as soon as `check` would raise."""
        self.executor.watch(alarm)

    def check(self) -> None:
        """Raise RuntimeError if this process cannot compute any more."""
        if (loss := self.executor.loss) is not None:
            raise loss

    def step(self) -> list[RequestOutput]:
        """Wait for an iteration and start the next one; return the requests' new outputs.

        Raises:
            RuntimeError: the GPU or a thread is lost, and the engine is unusable (see `is_lost`). Other
                failures end only the affected requests.
        """
        self.collect()
        self.launch()
        return self.take_outputs()

    def take_outputs(self) -> list[RequestOutput]:
        outputs = super().take_outputs()
        if not self._has_answered and self._first_asked_s is not None and any(o.tokens for o in outputs):
            self._has_answered = True
            seconds = time.perf_counter() - self._first_asked_s
            logger.info("%s: the first token came %.2f s after the first request", self.model_name, seconds)
        return outputs

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete all prompts, texts or token ids, together; `params` are for all or one per prompt.

        Returns:
            The outputs in the order of the prompts; with `n` above 1, the n outputs of a prompt in a row.

        Raises:
            ValueError: a prompt or a setting cannot be used; nothing runs then.
            EngineError: the engine had to give up a request.
        """
        params = params or SamplingParams()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        if len(each) != len(prompts):
            raise ValueError(f"got {len(prompts)} prompts but {len(each)} sampling params")
        return [Completion.of(outputs) for outputs in self.run(prompts, each)]

    def embed(self, prompts: Sequence[Prompt], pooling: Pooling = "mean") -> list[FloatArray]:
        """Return one embedding [hidden] per prompt: hidden states after the final norm, of length 1.

        Args:
            pooling: the mean over the tokens, or the last token.

        Raises:
            ValueError, EngineError: see `generate`.
        """
        each = [SamplingParams(pooling=pooling)] * len(prompts)
        return [cast("FloatArray", outputs[-1].embedding) for outputs in self.run(prompts, each)]

    def run(self, prompts: Sequence[Prompt], each: Sequence[SamplingParams]) -> list[list[RequestOutput]]:
        """Run requests to their end; return their outputs, by prompt and choice.

        Raises:
            ValueError, EngineError: see `generate`.
        """
        if self.has_requests:
            raise RuntimeError("the engine must be idle, but requests are running")
        prepared = [self.prepare(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
        collected: dict[tuple[str, int], list[RequestOutput]] = {}
        try:
            for index, request in enumerate(prepared):
                self.add(str(index), request)
                collected |= {(str(index), choice): [] for choice in range(request.params.n)}
            while self.has_requests:
                for output in self.step():
                    collected[output.request_id, output.choice].append(output)
        finally:
            for index in range(len(prompts)):  # after an error or Ctrl-C; otherwise none is left
                self.abort(str(index))
        for *_, last in collected.values():
            if last.finish_reason is None or last.error is not None:
                raise EngineError(last.error or "the request did not end")
        return list(collected.values())

    def stats(self) -> EngineStats:
        queues, counters = self._scheduler.queues, asdict(self._scheduler.counters)
        del counters["num_accepted"]  # a part of `speculative`
        return EngineStats(
            model=self.model_name,
            policy=self._policy,
            device=self._decoder.device.type,
            dtype=str(self._decoder.dtype).removeprefix("torch."),
            gpu_sms=self.streams.sms,
            max_context_tokens=self.max_context_tokens,
            block_size=self._kv_cache.block_size,
            num_running=queues.num_running,
            num_running_at={tier: len(requests) for tier, requests in queues.running.items()},
            num_waiting=len(queues.waiting),
            num_iterations=self.num_started,
            **counters,
            outside_s=self.outside_s,
            pools=self._kv_cache.usage(),
            disk=DiskCounters() if self._kv_cache.disk is None else self._kv_cache.disk.counters,
            speculative=self._scheduler.speculative,
        )

    def live_view(self) -> LiveView:
        """Return the engine's current activity for display; poll about once per second.

        The call enables notes about iterations for some seconds; the next view contains them.
        """
        notes, queues, device = self._notes, self._scheduler.queues, self._decoder.device
        notes.ask()
        stats, has_gpu = self.stats(), device.type == "cuda"
        running = [request for _, request in queues.placed]
        gpu_caches = [pool.num_blocks for tier, pool in stats.pools.items() if not tier.in_host_memory]
        return LiveView(
            stats=stats,
            requests=live_requests(queues.placed, queues.async_groups),
            num_gpu_alone=num_fitting(running, gpu_caches[0], stats.block_size) if gpu_caches else None,
            is_gpu_imitated=not has_gpu,
            device_name=torch.cuda.get_device_name(device) if has_gpu else None,
            weights_bytes=self._decoder.nbytes,
            rates=notes.rates,
            iterations=notes.iterations,
            spans=notes.spans,
            spans_age_s=notes.spans_age_s,
            tables=self._cost_model,
            workers={} if self._workers is None else self._workers.states,
        )

    def close(self) -> None:
        """Stop all threads and drop weights and caches; the engine is unusable afterwards."""
        if "_decoder" in vars(self):
            del self._decoder
            super().close()
            self._resources.close()
            self.grammars.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
