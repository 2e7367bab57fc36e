"""Errors of requests."""

from collections.abc import Mapping


class SettingError(ValueError):
    """A setting that cannot be used. The message is the field and the reason, the rest of the sentence."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.field} {self.reason}"

    def named(self, names: Mapping[str, str]) -> "SettingError":
        """Return the error with the field's name in another interface: `engine's name -> name there`."""
        return SettingError(names.get(self.field, self.field), self.reason)


class ContextLengthError(ValueError):
    """A prompt, or prompt and max_tokens together, that exceeds the context.

    The message starts like OpenAI's, because agents search for that text.

    Args:
        max_tokens: requested output tokens; None: the prompt alone is too long.
        is_whole: `num_tokens` counts the whole prompt, not a start that is too long already.
    """

    def __init__(
        self, limit: int, num_tokens: int, max_tokens: int | None = None, is_whole: bool = True
    ) -> None:
        super().__init__(limit, num_tokens, max_tokens, is_whole)
        self.limit = limit
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens
        self.is_whole = is_whole

    def __str__(self) -> str:
        beginning = f"This model's maximum context length is {self.limit} tokens"
        if self.max_tokens is None:
            has = f"the prompt has {self.num_tokens} tokens{'' if self.is_whole else ' and more'}"
            return f"{beginning}, however {has}: shorten the prompt to leave room for an answer"
        total = self.num_tokens + self.max_tokens
        return (
            f"{beginning}, however you requested {total} tokens ({self.num_tokens} in the prompt, "
            f"{self.max_tokens} by max_tokens): shorten the prompt or ask for "
            f"{self.limit - self.num_tokens} at most"
        )


class NoEmbeddingsError(ValueError):
    """The engine produces answers, not embeddings."""


class EngineError(RuntimeError):
    """A request that the engine had to give up."""
