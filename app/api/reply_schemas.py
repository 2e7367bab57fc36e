"""Types of the answers, for /openapi.json.

Answers are made as plain dicts, which a test checks against these. Models of pydantic's would take as long
per chunk (8 µs) and as many lines, but refuse what a client may send and read back: half of a surrogate pair,
in the name of a tool for instance. And clients tell a field that is null from one that is not there.
"""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # Python's own cannot be read by pydantic before 3.12

EndReason = Literal["stop", "length", "tool_calls"]


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    error: ErrorDetail


class AnthropicErrorDetail(TypedDict):
    type: str
    message: str


class AnthropicError(TypedDict):
    """Why a request was refused, for Anthropic's clients."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class CachedTokens(TypedDict):
    cached_tokens: int


class ThoughtTokens(TypedDict):
    reasoning_tokens: int


class CompletionTokens(ThoughtTokens):
    accepted_prediction_tokens: int  # of `prediction`
    rejected_prediction_tokens: int


class TokenUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokens


class FunctionCall(TypedDict):
    name: str
    arguments: str


class MadeCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[MadeCall]]


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: EndReason
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_token_ids: NotRequired[list[int]]


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: EndReason
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: TokenUsage


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: ThoughtTokens
    total_tokens: int


class ResponseBody(TypedDict):
    """A response: its settings, and its items."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    previous_response_id: str | None
    store: bool


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(TypedDict):
    """The new items of a response's request."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None


class AnthropicUsage(TypedDict):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicAnswer(TypedDict):
    """The answer of a chat, in blocks."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(TypedDict):
    input_tokens: int


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str  # the model's own name; `id` may be an alias
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class Health(TypedDict):
    status: Literal["ok", "no model", "loading", "restarting", "stopping", "failed"]
    model: NotRequired[str]
    reason: NotRequired[str]
