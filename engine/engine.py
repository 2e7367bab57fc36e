"""The engine: requests go in at any time, every step brings some tokens out."""

import logging
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

import torch

from neo_desktop.engine.batch import (
    DeviceMemoryError,
    FloatArray,
    GraphReach,
    IterationPlan,
    IterationTiming,
    SampledToken,
)
from neo_desktop.engine.cuda.errors import is_lost
from neo_desktop.engine.detokenizer import IncrementalText
from neo_desktop.engine.doctor.first_start import check_at_first_start
from neo_desktop.engine.doctor.safe_start import safe_start
from neo_desktop.engine.doctor.trials import Subject
from neo_desktop.engine.execute.build import build_executor
from neo_desktop.engine.execute.executor import Executor, Wait
from neo_desktop.engine.execute.timeline import Timeline
from neo_desktop.engine.grammar import GrammarCompiler
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.live import LiveView, Watch, live_requests, num_fitting
from neo_desktop.engine.loading import LoadedModel, choose_device
from neo_desktop.engine.options import BUILTIN, EngineKeywords, EngineOptions
from neo_desktop.engine.placement import get_policy
from neo_desktop.engine.predict.corrected import CorrectedCostModel
from neo_desktop.engine.predict.cost_model import CostModel, TableCostModel
from neo_desktop.engine.profiling.budget import BLOCK_SIZE
from neo_desktop.engine.profiling.profile_cache import load_or_profile
from neo_desktop.engine.progress import Progress, part
from neo_desktop.engine.request import FinishReason, Request, RequestOutput
from neo_desktop.engine.sampling_params import Pooling, SamplingParams
from neo_desktop.engine.schedule.scheduler import Scheduler
from neo_desktop.engine.setup import MEASURING, Setup, set_up
from neo_desktop.engine.stats import EngineStats

logger = logging.getLogger(__name__)

WEIGHTS_SHARE = 0.5  # of the progress of loading; the rest is for measuring, which only the first start needs


class ContextLengthError(ValueError):
    """A prompt, or prompt and max_tokens together, that no context can hold."""


class EngineError(RuntimeError):
    """A request that the engine had to give up."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished output of `generate`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    tokens: tuple[SampledToken, ...]  # the same tokens, with log-probabilities if they were asked for
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens whose KV was reused


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
    ) -> None:
        self.model_name = model.name
        self.config = model.config
        self.tokenizer = model.tokenizer
        self.max_context_tokens = min(model.config.max_context_tokens, scheduler.max_context_tokens)
        self.eos_token_ids = model.config.eos_token_ids or model.tokenizer.eos_token_ids
        # Any thread may use it: before a request is added, so that compiling holds nobody up.
        self.grammars = GrammarCompiler(model.tokenizer, model.config.vocab_size, self.eos_token_ids)
        self.streams = model.streams
        self._decoder = model.decoder
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._executor = executor
        self._policy = policy
        self._cost_model = cost_model
        self._watch = Watch(timeline)
        self._num_arrivals = 0
        self._num_iterations = 0
        self._under_way: tuple[IterationPlan, Wait] | None = None
        self._last_end_s: float | None = None  # when the iteration before ended, if no pause followed
        self._outside_s = 0.0

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
        return cls.from_options(EngineOptions(model=model, **options), cost_model, progress)

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
            setup = set_up(options, part(progress, 0.0, WEIGHTS_SHARE))
            timeline = None if options.trace_timeline is None else Timeline(options.trace_timeline)
            measured = part(progress, WEIGHTS_SHARE, 1.0, MEASURING)
            return cls.from_setup(
                setup, options.policy, cost_model=cost_model, timeline=timeline, progress=measured
            )

    @classmethod
    def from_setup(
        cls,
        setup: Setup,
        policy: str,
        *,
        cost_model: CostModel | None = None,
        timeline: Timeline | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Make an engine of a loaded model and the memory of all places that the policy uses.

        `close` drops them from the engine; the memory is free when nobody else refers to the setup.
        See `from_options` for the arguments.

        Raises:
            ValueError: the policy is unknown.
        """
        chosen_policy = get_policy(policy)
        decoder, limits, storage = setup.model.decoder, setup.limits, setup.storage
        streams = setup.model.streams
        kv_cache = KVCache(setup.num_blocks, BLOCK_SIZE)
        # With a single place to live there is nothing to predict.
        if cost_model is None and chosen_policy.needs_predictions and all(setup.num_blocks.values()):
            cost_model = load_or_profile(decoder, storage, limits, progress, streams=streams)
        # Without a trace, single iterations are recorded for those who look.
        timeline = timeline or Timeline(max_spans=0, is_continuous=False)
        executor = build_executor(decoder, storage, limits.max_batch_requests, timeline, streams)
        corrected = None
        if cost_model is not None:
            # Weakly: whoever still knows a closed engine must not keep weights and caches alive by that.
            known = weakref.ref(executor)
            corrected = CorrectedCostModel(
                cost_model, lambda: GraphReach() if (alive := known()) is None else alive.graph_reach
            )
        scheduler = Scheduler(kv_cache, chosen_policy, limits, corrected)
        return cls(setup.model, scheduler, kv_cache, executor, policy, corrected, timeline)

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, or an iteration has not."""
        return self._has_requests or self._under_way is not None

    @property
    def _has_requests(self) -> bool:
        return self._scheduler.num_waiting + self._scheduler.num_running > 0

    def add_request(
        self, request_id: str, prompt: str | Sequence[int], params: SamplingParams
    ) -> tuple[int, ...]:
        """Queue a prompt, given as text or token ids, and return its token ids.

        Raises:
            ContextLengthError: prompt and output would not fit into the context.
            ValueError: the prompt is empty, ids are outside the vocabulary, or the grammar cannot be used.
        """
        token_ids = tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        self._check_prompt(token_ids, params)
        self._check_token_ids("stop_token_ids holds", params.stop_token_ids)
        self._check_token_ids("logit_bias holds", params.logit_bias)
        if params.grammar is not None:
            self.grammars.compile(params.grammar)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        for choice in range(params.n):
            self._num_arrivals += 1
            request = Request(
                request_id,
                token_ids,
                params,
                choice=choice,
                seed=seed,
                arrival=self._num_arrivals,
                max_context_tokens=self.max_context_tokens,
                eos_token_ids=self.eos_token_ids,
                text=IncrementalText(self.tokenizer.decode_stream(), params.stop),
                grammar=None
                if params.grammar is None
                else self.grammars.start(params.grammar, params.grammar_after),
            )
            self._scheduler.add(request)
        return token_ids

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request now and free its memory; return the last of its outputs, if it was still there."""
        return self._scheduler.abort(request_id)

    def step(self, before_next: Callable[[], object] | None = None) -> list[RequestOutput]:
        """Wait for an iteration and start the next one; return what each request gained by the first.

        While the device computes, the next iteration is decided on, and the caller has time for the outputs.

        Args:
            before_next: called before the next iteration is planned; may add and abort requests.

        Raises:
            RuntimeError: the GPU or a thread is lost to this process, so that the engine cannot be used any
                more (see `is_lost`). Other failures end the requests concerned.
        """
        outputs = self._start_iteration() if self._under_way is None else []
        if self._under_way is None:
            return outputs
        self._scheduler.look_ahead()
        gained, failed = self._end_iteration()
        if before_next is not None:
            before_next()
        failed += self._start_iteration()
        # Text is made now, while the device computes. Who aborted a request has got its last output.
        return [
            request.take_output() for request in gained if request.finish_reason is not FinishReason.ABORT
        ] + failed

    def _start_iteration(self) -> list[RequestOutput]:
        """Plan an iteration and start it; return the ends of requests that this failed for."""
        plan = self._scheduler.schedule()
        if plan is None:
            self._last_end_s = None
            return []
        self._num_iterations += 1
        try:
            self._under_way = plan, self._executor.start(plan)
        except Exception as error:  # whatever broke, the other requests must go on
            return self._give_up(error)
        return []

    def _end_iteration(self) -> tuple[list[Request], list[RequestOutput]]:
        """Wait for the iteration under way; return who gained by it, and the ends of those it failed for."""
        assert self._under_way is not None
        (plan, wait), self._under_way = self._under_way, None
        try:
            result = wait()
        except Exception as error:
            return [], self._give_up(error)
        if result.timing is not None:
            self._book_time(result.timing)
            if self._watch.is_on:
                self._watch.note(plan, result.timing)
            if self._cost_model is not None:
                self._cost_model.learn(plan, result.timing)
        return self._scheduler.update(result), []

    def _give_up(self, error: Exception) -> list[RequestOutput]:
        """Take in that the iteration under way failed; return the ends of the requests that cannot go on.

        Raises:
            the error: nothing can be computed in this process any more.
        """
        self._last_end_s = None
        if is_lost(error):
            raise error
        if not isinstance(error, DeviceMemoryError):
            logger.error("an iteration failed", exc_info=error)
            return self._scheduler.fail(f"the engine failed: {error}")
        is_known = self._scheduler.is_short_of_memory
        if not self._scheduler.shrink():
            return self._scheduler.fail(f"the device has no memory left: {error}")
        if not is_known:  # it stays so for a while, and larger iterations are tried now and then
            logger.warning("the device is short of memory: going on with smaller iterations (%s)", error)
        return []

    def _book_time(self, timing: IterationTiming) -> None:
        """Add up what passes between iterations that follow each other."""
        now = time.perf_counter()
        if self._last_end_s is not None:
            self._outside_s += now - self._last_end_s - timing.total_ms / 1e3
        self._last_end_s = now

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
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
        each = _one_per_prompt(params or SamplingParams(), len(prompts))
        return [_completion(outputs) for outputs in self._run(prompts, each)]

    def embed(self, prompts: Sequence[str | Sequence[int]], pooling: Pooling = "mean") -> list[FloatArray]:
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
        each = [SamplingParams(pooling=pooling)] * len(prompts)
        return [_embedding(outputs) for outputs in self._run(prompts, each)]

    def _run(
        self, prompts: Sequence[str | Sequence[int]], each: Sequence[SamplingParams]
    ) -> list[list[RequestOutput]]:
        """Carry requests out; return what came of each of their outputs."""
        if self._has_requests:
            raise RuntimeError("the engine is needed for these prompts alone, but requests are running")
        collected: dict[tuple[str, int], list[RequestOutput]] = {}
        try:
            for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
                self.add_request(str(index), prompt, one)
                collected |= {(str(index), choice): [] for choice in range(one.n)}
            while self._has_requests:
                for output in self.step():
                    collected[output.request_id, output.choice].append(output)
        finally:
            for index in range(len(prompts)):  # after an error or Ctrl-C; otherwise nothing is left
                self.abort(str(index))
        return list(collected.values())

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
            num_iterations=self._num_iterations,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_cached_tokens=counters.num_cached_tokens,
            num_output_tokens=counters.num_output_tokens,
            num_preemptions=counters.num_preemptions,
            num_moves=counters.num_moves,
            num_cpu_decodes=counters.num_cpu_decodes,
            num_double_iterations=counters.num_double_iterations,
            outside_s=self._outside_s,
            pools=self._kv_cache.usage(),
        )

    def live_view(self) -> LiveView:
        """Return what the engine does right now, for people; once a second is often enough.

        For some seconds from then on notes about iterations are taken, which the next view tells of.
        """
        self._watch.ask()
        stats, device, running = self.stats(), self._decoder.device, self._scheduler.running
        is_cuda = device.type == "cuda"
        gpu_cache = next((pool for place, pool in stats.pools.items() if not place.in_host_memory), None)
        tables = None if self._cost_model is None else self._cost_model.base
        requests = [request for _, request in running]
        return LiveView(
            stats=stats,
            requests=live_requests(running),
            num_gpu_alone=(
                num_fitting(requests, gpu_cache.num_blocks, stats.block_size) if gpu_cache else None
            ),
            is_gpu_imitated=not is_cuda,
            device_name=torch.cuda.get_device_name(device) if is_cuda else None,
            weights_bytes=self.config.weight_bytes(self._decoder.dtype),
            rates=self._watch.rates,
            iterations=self._watch.iterations,
            spans=self._watch.spans,
            spans_age_s=self._watch.spans_age_s,
            tables=tables if isinstance(tables, TableCostModel) else None,
        )

    def close(self) -> None:
        """End all threads, drop weights and caches; nothing can be generated afterwards."""
        if (executor := vars(self).pop("_executor", None)) is not None:
            executor.close()
            self.grammars.close()
            del self._decoder

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_prompt(self, token_ids: tuple[int, ...], params: SamplingParams) -> None:
        if not token_ids:
            raise ValueError("the prompt is empty: give at least one token")
        num_tokens, limit = len(token_ids), self.max_context_tokens
        if num_tokens >= limit:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens, but the context holds {limit} including the answer: "
                "shorten the prompt"
            )
        if params.max_tokens is not None and num_tokens + params.max_tokens > limit:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens and max_tokens asks for {params.max_tokens} more, but "
                f"the context holds {limit}: shorten the prompt or ask for {limit - num_tokens} at most"
            )
        self._check_token_ids("the prompt holds", token_ids)

    def _check_token_ids(self, what: str, token_ids: Iterable[int]) -> None:
        vocab_size = self.config.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"{what} token id {token_id}, which is outside the vocabulary of {vocab_size} tokens"
                )


def _one_per_prompt(
    params: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> Sequence[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(f"there are {num_prompts} prompts but {len(params)} sampling params")
    return params


def _last(outputs: Sequence[RequestOutput]) -> RequestOutput:
    last = outputs[-1]
    if last.finish_reason is None or last.error is not None:
        raise EngineError(last.error or "the request did not end")
    return last


def _embedding(outputs: Sequence[RequestOutput]) -> FloatArray:
    embedding = _last(outputs).embedding
    assert embedding is not None
    return embedding


def _completion(outputs: Sequence[RequestOutput]) -> Completion:
    last = _last(outputs)
    assert last.finish_reason is not None
    tokens = tuple(token for output in outputs for token in output.tokens)
    return Completion(
        text="".join(output.text for output in outputs),
        token_ids=tuple(token.token_id for token in tokens),
        finish_reason=last.finish_reason,
        tokens=tokens,
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
    )
