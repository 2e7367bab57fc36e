"""Input processing: prompts are tokenised, checked and hashed, in any thread."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from neo_desktop.engine.errors import ContextLengthError, SettingError
from neo_desktop.engine.kv.block_pool import BlockHash, extend_hashes
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.marks import ChatText
from neo_desktop.models.tokenizer import Tokenizer
from neo_desktop.models.vision.prompt import ImageRows, ImageText

CHARS_PER_TOKEN = 8  # an upper bound on the average of texts; prose has about 4

Prompt = str | ChatText | Sequence[int]


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A prompt that an engine can take, and its sampling parameters."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    block_hashes: tuple[BlockHash, ...]  # of the prompt's full blocks
    images: ImageRows | None = None
    predicted_token_ids: tuple[int, ...] = ()  # of `SamplingParams.prediction`


@dataclass(frozen=True, slots=True)
class InputProcessor:
    """Prepares requests for an engine without access to it.

    It can be sent to another process, and is thread-safe.
    """

    tokenizer: Tokenizer
    vocab_size: int
    max_context_tokens: int
    block_size: int

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
        cuts_max_tokens: bool = False,
    ) -> PreparedRequest:
        """Tokenise a prompt and check that it can run.

        Args:
            add_special_tokens: add the tokenizer's special tokens to a text; chats have their own.
            cuts_max_tokens: reduce `max_tokens` to the room in the context.

        Raises:
            ContextLengthError: prompt and output exceed the context.
            SettingError: a setting names tokens outside the vocabulary.
            ValueError: the prompt is empty, or contains tokens outside the vocabulary, or its images have
                other rows than its text.
        """
        if isinstance(prompt, str | ChatText):
            token_ids = self._tokenise(prompt, add_special_tokens)
        else:
            token_ids = tuple(prompt)
        self._check_length(len(token_ids), None if cuts_max_tokens else params.max_tokens)
        if (unknown := self._unknown(token_ids)) is not None:
            raise ValueError(f"the prompt {self._outside(unknown)}")
        for field in ("stop_token_ids", "logit_bias"):
            if (unknown := self._unknown(getattr(params, field))) is not None:
                raise SettingError(field, self._outside(unknown))
        images = None
        if isinstance(prompt, ImageText) and prompt.images:
            images = ImageRows.of(prompt.images, token_ids)
        hashes: list[BlockHash] = []
        if params.pooling is None:  # pooling needs every token's hidden state, so no KV may be reused
            extend_hashes(hashes, token_ids, self.block_size, images)
        predicted = (params.prediction or "")[: self.max_context_tokens * CHARS_PER_TOKEN]
        predicted_token_ids = self._encode(predicted, False) if predicted else ()
        return PreparedRequest(token_ids, params, tuple(hashes), images, tuple(predicted_token_ids))

    def _tokenise(self, text: str | ChatText, add_special_tokens: bool) -> tuple[int, ...]:
        # A far too long text is rejected after its start; tokenising all could take minutes.
        num_chars = self.max_context_tokens * CHARS_PER_TOKEN
        beginning = text.beginning(num_chars) if isinstance(text, ChatText) else text[:num_chars]
        token_ids = self._encode(beginning, add_special_tokens)
        if len(beginning) < len(text):
            if len(token_ids) > self.max_context_tokens:
                raise ContextLengthError(self.max_context_tokens, len(token_ids), is_whole=False)
            token_ids = self._encode(text, add_special_tokens)
        return tuple(token_ids)

    def _encode(self, text: str | ChatText, add_special_tokens: bool) -> list[int]:
        if isinstance(text, ChatText):
            return self.tokenizer.encode_chat(text)
        return self.tokenizer.encode(text, add_special_tokens)

    def _check_length(self, num_tokens: int, max_tokens: int | None) -> None:
        limit = self.max_context_tokens
        if not num_tokens:
            raise ValueError("the prompt is empty: give at least one token")
        if num_tokens >= limit:
            raise ContextLengthError(limit, num_tokens)
        if max_tokens is not None and num_tokens + max_tokens > limit:
            raise ContextLengthError(limit, num_tokens, max_tokens)

    def _unknown(self, token_ids: Iterable[int]) -> int | None:
        return next((token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size), None)

    def _outside(self, token_id: int) -> str:
        return f"holds token id {token_id}, which is outside the vocabulary of {self.vocab_size} tokens"
