"""An engine around llama.cpp: one request after the other, a piece of a prompt or a token per step.

It takes the place of `Engine` (see `ServedEngine`): prompts are checked, tokens are chosen and answers end
with the same code. There is one tier of KV, and nothing is batched, offloaded or predicted. KV of the last
request stays, so that the next turn of a chat computes only its new tokens.
"""

import itertools
import logging
from collections import deque
from collections.abc import Callable

import torch

from neo_desktop.app.llamacpp.choice import LLAMACPP_NOTE
from neo_desktop.app.llamacpp.library import LlamaContext, LlamaModel
from neo_desktop.app.llamacpp.tokenizer import LlamaCppTokenizer
from neo_desktop.engine.errors import NoEmbeddingsError
from neo_desktop.engine.generate import new_requests
from neo_desktop.engine.grammar import GrammarCompiler
from neo_desktop.engine.input_processor import InputProcessor, PreparedRequest, Prompt
from neo_desktop.engine.kv.cache import PoolUsage
from neo_desktop.engine.kv_tier import MEASURED_TIERS
from neo_desktop.engine.live import LiveView, Notes, live_requests
from neo_desktop.engine.request import FinishReason, Request, RequestOutput
from neo_desktop.engine.sampler import sample
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.stats import LLAMACPP, EngineStats
from neo_desktop.models.config import GenerationDefaults
from neo_desktop.models.vision.tower import TEXT_ONLY, Vision

logger = logging.getLogger(__name__)


class LlamaCppInputProcessor(InputProcessor):
    """Refuses what llama.cpp is not asked for here."""

    def prepare(self, prompt: Prompt, params: SamplingParams, **options: bool) -> PreparedRequest:
        """Check a prompt. NoEmbeddingsError: the request is for embeddings."""
        if params.pooling is not None:
            raise NoEmbeddingsError(
                "llama.cpp computes this model, for answers only: for embeddings, choose a model that "
                "neo-desktop's own engine runs"
            )
        return super().prepare(prompt, params, **options)


class LlamaCppEngine:
    """A `ServedEngine`; only `grammars` is thread-safe."""

    def __init__(
        self,
        model: LlamaModel,
        context: LlamaContext,
        max_context_tokens: int,
        batch_tokens: int,  # of a prompt, that a step computes at most
        *,
        gpu: bool,
    ) -> None:
        self.model_name = model.file.stem
        self.note = LLAMACPP_NOTE
        self.vision: Vision | None = None
        self.blindness = TEXT_ONLY
        self.gpu_bytes = model.nbytes if gpu else 0
        self.sampling_defaults = _sampling_defaults(model)
        tokenizer = LlamaCppTokenizer(model.file)
        no_block = max_context_tokens + 1  # tokens: none is ever full, since nothing is reused by its hash
        self.input_processor: InputProcessor = LlamaCppInputProcessor(
            tokenizer, model.num_tokens, max_context_tokens, no_block
        )
        self.eos_token_ids = tokenizer.eos_token_ids
        self.grammars = GrammarCompiler(tokenizer, model.num_tokens, self.eos_token_ids)
        self._model = model
        self._context = context
        self._batch_tokens = batch_tokens
        self._place = next(place for place in MEASURED_TIERS if place.in_host_memory is not gpu)
        self._held: list[int] = []  # tokens whose KV is in the context
        self._waiting: deque[Request] = deque()
        self._running: Request | None = None
        self._outputs: list[RequestOutput] = []
        self._arrivals = itertools.count(1)
        self._notes = Notes()
        self._num_steps = self._num_prompt_tokens = self._num_cached_tokens = self._num_output_tokens = 0

    @property
    def has_work(self) -> bool:
        return self._running is not None or bool(self._waiting or self._outputs)

    def add(self, request_id: str, prepared: PreparedRequest) -> None:
        self._waiting += new_requests(
            request_id, prepared, self.input_processor, self.eos_token_ids, self.grammars, self._arrivals
        )

    def abort(self, request_id: str) -> None:
        self._waiting = deque(each for each in self._waiting if each.owner_id != request_id)
        self._outputs = [output for output in self._outputs if output.request_id != request_id]
        if self._running is not None and self._running.owner_id == request_id:
            self._running = None

    def watch(self, alarm: Callable[[], object]) -> None:
        """Do nothing: errors come up while it computes."""

    def check(self) -> None:
        """Do nothing, as `watch`."""

    def rest(self) -> bool:
        return False

    def collect(self) -> None:
        """Compute a piece of the running request's prompt, or its next token."""
        if self._running is None and self._waiting:
            self._begin(self._waiting.popleft())
        request = self._running
        if request is None:
            return
        try:
            self._step(request)
        except RuntimeError as error:
            logger.error("a request failed", exc_info=error)
            self._held.clear()
            request.finish(FinishReason.ERROR, f"the engine failed: {error}")
        self._outputs.append(request.take_output())
        if request.is_finished:
            self._running = None

    def launch(self) -> None:
        """Nothing is computed while others look: see `collect`."""

    def take_outputs(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _begin(self, request: Request) -> None:
        """Find out how much of a prompt is in the context."""
        prompt = request.prompt_token_ids
        same, most = 0, min(len(prompt) - 1, len(self._held))  # the last token gives the first logits
        while same < most and prompt[same] == self._held[same]:
            same += 1
        request.num_computed_tokens = request.num_cached_tokens = self._context.truncate(same)
        del self._held[request.num_computed_tokens :]
        self._num_prompt_tokens += len(prompt)
        self._num_cached_tokens += request.num_cached_tokens
        self._running = request

    def _step(self, request: Request) -> None:
        start = request.num_computed_tokens
        token_ids = request.token_ids[start : start + self._batch_tokens]
        logits = self._context.evaluate(token_ids)
        self._held += token_ids
        self._num_steps += 1
        request.num_computed_tokens += len(token_ids)
        is_output = request.num_computed_tokens == request.num_tokens
        if is_output:
            (token,) = sample(torch.from_numpy(logits).unsqueeze(0), [request.sampling_input()])
            request.num_tokens += 1
            if token is None:
                request.finish(
                    FinishReason.ERROR, "the model's output is not finite: its weights may be damaged"
                )
            else:
                self._num_output_tokens += 1
                request.append(token)
        self._notes.count(len(token_ids) if start < request.num_prompt_tokens else 0, int(is_output))

    def stats(self) -> EngineStats:
        capacity, held = self.input_processor.max_context_tokens, len(self._held)
        used = held if self._running is not None else 0
        pool = PoolUsage(capacity, num_used_blocks=used, num_cached_blocks=held - used)
        num_running = int(self._running is not None)
        return EngineStats(
            model=self.model_name,
            policy="one-by-one",
            device="cpu" if self._place.in_host_memory else "cuda",
            dtype=self._model.stored_as,
            max_context_tokens=capacity,
            block_size=1,
            num_running=num_running,
            num_running_at={self._place: num_running},
            num_waiting=len(self._waiting),
            num_iterations=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            pools={self._place: pool},
            backend=LLAMACPP,
        )

    def live_view(self) -> LiveView:
        self._notes.ask()
        running = [] if self._running is None else [(self._place, self._running)]
        return LiveView(
            stats=self.stats(),
            requests=live_requests(running),
            device_name=None if self._place.in_host_memory else "GPU, by llama.cpp",
            weights_bytes=self._model.nbytes,
            rates=self._notes.rates,
        )

    def close(self) -> None:
        """Drop weights and context; may be called again."""
        self._context.close()
        self._model.close()
        self.grammars.close()


def _sampling_defaults(model: LlamaModel) -> GenerationDefaults:
    """Return the sampling that the model's makers recommend."""

    def number(key: str) -> float | None:
        value = model.metadata(f"general.sampling.{key}")
        return None if value is None else float(value)

    top_k = number("top_k")
    values = {
        "temperature": number("temp"),
        "top_p": number("top_p"),
        "min_p": number("min_p"),
        "repetition_penalty": number("penalty_repeat"),
    }
    return GenerationDefaults.within_bounds(values, top_k=None if top_k is None else int(top_k))
