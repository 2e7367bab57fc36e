"""The model's output on its way to the client: thoughts, answer and tool calls, separated."""

import dataclasses
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from neo_desktop.app.engines.generation import Generation
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.errors import ApiError, DeadEndError, blaming
from neo_desktop.app.generate.calls import CallArguments, CallReader, CallStart, Piece, Text, Thought
from neo_desktop.app.generate.conversation import Conversation, Prepared, prepare, special_id
from neo_desktop.app.generate.structure import Structure, enforcing
from neo_desktop.app.generate.tools import Tool
from neo_desktop.engine.batch import SampledToken
from neo_desktop.engine.errors import SettingError
from neo_desktop.engine.grammar import from_enforceable
from neo_desktop.engine.input_processor import Prompt
from neo_desktop.engine.request import RequestOutput
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.config import GenerationDefaults
from neo_desktop.models.thoughts import Thoughts, ThoughtSplitter, ends_thinking
from neo_desktop.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Step:
    """The progress of one output in one iteration."""

    index: int
    pieces: Sequence[Piece]
    tokens: Sequence[SampledToken]
    end: str | None  # "stop", "length" or "tool_calls"; None: more will follow
    text: str  # as the model wrote it, marks included
    stopped_by: str | None = None  # the stop string that ended it


class TokensUsed:
    """Tokens over all outputs of a request; a prompt counts once, however many outputs it has."""

    def __init__(self) -> None:
        self.num_thought_tokens = 0
        self._outputs: dict[int, RequestOutput] = {}  # the last ones, with totals
        self._prompts: dict[str, RequestOutput] = {}  # by request

    def add(self, index: int, output: RequestOutput) -> None:
        self._outputs[index] = self._prompts[output.request_id] = output

    @property
    def num_prompt_tokens(self) -> int:
        return sum(output.num_prompt_tokens for output in self._prompts.values())

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was reused."""
        return sum(output.num_cached_tokens for output in self._prompts.values())

    @property
    def num_output_tokens(self) -> int:
        return sum(output.num_output_tokens for output in self._outputs.values())

    @property
    def predicted(self) -> tuple[int, int]:
        """Tokens of the client's `prediction` that were drafted and right, and wrong."""
        outputs = self._outputs.values()
        accepted = sum(output.num_accepted_predicted for output in outputs)
        return accepted, sum(output.num_rejected_predicted for output in outputs)


class Outputs:
    """The outputs of a request, read; leaving the `async with` aborts the open ones."""

    def __init__(
        self, generation: Generation, tokenizer: Tokenizer, prepared: Prepared | None, grammar_field: str
    ) -> None:
        self.usage = TokensUsed()
        self._grammar_field = grammar_field or None  # of the body, which asked for a form
        self._generation = generation
        self.prompt_token_ids = generation.prompt_token_ids
        self._prepared = prepared
        self._mark = "" if prepared is None else prepared.tool_format.opening
        self._mark_id = special_id(tokenizer, self._mark) if prepared and prepared.tools else None
        self._readers: defaultdict[int, _Reader] = defaultdict(lambda: _Reader(self._prepared))
        self._callers: set[int] = set()  # outputs with calls
        # The answer so far, without the beginning of a mark at its end.
        self.begun = self._readers[0].feed(prepared.begun) if prepared and prepared.begun else []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._generation.close()

    def flush(self) -> list[Piece]:
        """Return what the first output's reader still holds back, for an answer that ends early."""
        return self._readers[0].flush(is_cut=True)

    async def __aiter__(self) -> AsyncIterator[Step]:
        try:
            async for index, output in self._generation:
                yield self._step(index, output)
        except DeadEndError as error:
            raise ApiError(
                400, f"the answer's {error}", param=self._grammar_field, code=error.code
            ) from error

    def _step(self, index: int, output: RequestOutput) -> Step:
        reader, text = self._readers[index], output.text
        if any(token.token_id == self._mark_id for token in output.tokens):
            text += self._mark  # a special token, which has no text of its own
        pieces = reader.feed(text)
        self.usage.add(index, output)
        if pieces and isinstance(pieces[-1], Thought):
            self.usage.num_thought_tokens += len(output.tokens)
        end = None if output.finish_reason is None else str(output.finish_reason)
        if end is not None:
            pieces += reader.flush(is_cut=end == "length")
        if any(isinstance(piece, CallStart) for piece in pieces):
            self._callers.add(index)
        if end == "stop" and index in self._callers:
            end = "tool_calls"
        return Step(index, pieces, output.tokens, end, text, output.stopped_by)


class _Reader:
    """Reads one output: thoughts first, then calls; nothing at all in raw completions."""

    def __init__(self, prepared: Prepared | None) -> None:
        self._thoughts = ThoughtSplitter(prepared.is_thinking) if prepared else None
        self._calls: CallReader | None = None
        if prepared and prepared.tools:
            max_calls = None if prepared.is_parallel else 1
            names = {tool.name for tool in prepared.tools}
            self._calls = CallReader(
                prepared.tool_format, names, is_begun=prepared.is_calling, max_calls=max_calls
            )

    def feed(self, text: str) -> list[Piece]:
        if self._thoughts is None:
            return [Text(text)] if text else []
        return self._pieces(self._thoughts.feed(text))

    def flush(self, *, is_cut: bool) -> list[Piece]:
        """End the text; `is_cut`: the model would have written more."""
        pieces = self._pieces(self._thoughts.flush()) if self._thoughts else []
        return pieces + (list(self._calls.flush(is_cut=is_cut)) if self._calls else [])

    def _pieces(self, parts: Iterable[tuple[str, str]]) -> list[Piece]:
        pieces: list[Piece] = []
        for kind, text in parts:
            if kind == "thought":
                pieces.append(Thought(text))
            else:
                pieces += self._calls.feed(text) if self._calls else [Text(text)]
        return pieces


@dataclass(slots=True)
class Call:
    call_id: str
    name: str
    arguments: str = ""  # the text of a JSON object, or of the beginning of one that was cut


@dataclass(slots=True)
class Answer:
    """One output, collected."""

    thought: str = ""
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    end: str | None = None
    stopped_by: str | None = None

    def add(self, step: Step) -> None:
        self.take(step.pieces)
        self.tokens += step.tokens
        self.end, self.stopped_by = step.end, step.stopped_by

    def take(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Text(text):
                    self.text += text
                case Thought(text):
                    self.thought += text
                case CallStart(_, call_id, name):
                    self.calls.append(Call(call_id, name))
                case CallArguments(number, text):
                    self.calls[number].arguments += text


async def collect(outputs: Outputs) -> list[Answer]:
    answers: defaultdict[int, Answer] = defaultdict(Answer)
    async with outputs:
        async for step in outputs:
            answers[step.index].add(step)
    return [answers[index] for index in sorted(answers)]


def sampling_params(defaults: GenerationDefaults, **asked: Any) -> SamplingParams:
    """Return what was asked for; what was left open (None) is the model's own recommendation."""
    values: dict[str, Any] = {
        "temperature": 0.0 if defaults.do_sample is False else defaults.temperature,
        **{name: getattr(defaults, name) for name in ("top_k", "top_p", "min_p", "repetition_penalty")},
    }
    values |= {name: value for name, value in asked.items() if value is not None}
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


async def begin(
    service: EngineService,
    conversation: Conversation,
    params: SamplingParams,
    *,
    cuts_max_tokens: bool = False,
) -> Outputs:
    """Queue the next message of a conversation; `cuts_max_tokens`: see `InputProcessor.prepare`."""
    prepared = await prepare(service, conversation)
    is_thinking = ends_thinking(prepared.begun, prepared.is_thinking)
    thoughts: Thoughts = "open" if is_thinking else "possible"
    params = dataclasses.replace(params, thoughts=thoughts, thought_tokens=conversation.thought_tokens)
    forms = conversation.structure.field if conversation.structure else "tools"
    with enforcing(forms):
        params = dataclasses.replace(params, grammar=prepared.grammar, grammar_after=prepared.grammar_after)
    options = {"add_special_tokens": False, "cuts_max_tokens": cuts_max_tokens}
    return await _submit(service, [prepared.prompt], params, conversation.field, forms, prepared, **options)


async def complete(
    service: EngineService,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    structure: Structure | None,
    field: str,
    *,
    add_special_tokens: bool,
) -> Outputs:
    """Queue the continuation of prompts, which `field` of the body holds."""
    form = structure.field if structure is not None else ""
    if structure is not None:
        with enforcing(form):
            params = dataclasses.replace(params, grammar=structure.grammar())
    return await _submit(service, prompts, params, field, form, add_special_tokens=add_special_tokens)


async def _submit(
    service: EngineService,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    field: str,
    grammar_field: str,
    prepared: Prepared | None = None,
    **options: bool,
) -> Outputs:
    """Queue prompts; calls of the tools are part of the grammar."""
    try:
        with blaming(field):
            generation = await service.submit(prompts, params, **options)
    except SettingError as error:
        if prepared is not None and error.field == "grammar":
            await _blame(service, prepared.tools)
        raise error.named({"grammar": grammar_field}) from error
    return Outputs(generation, service.tokenizer, prepared, grammar_field)


async def _blame(service: EngineService, tools: Sequence[Tool]) -> None:
    """Raise an error for the first tool whose schema alone cannot be used."""
    for tool in tools:
        try:
            await service.compile(from_enforceable(tool.enforced()))
        except SettingError as error:
            reason = f"cannot be enforced: the schema of tool {tool.name!r} {error.reason}"
            raise SettingError("tools", reason) from error
