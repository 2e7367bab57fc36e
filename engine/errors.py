"""What can be wrong with a request."""

from collections.abc import Mapping


class SettingError(ValueError):
    """A setting that cannot be used.

    Args:
        field: its name, with which the message begins.
        reason: the rest of the sentence.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.field} {self.reason}"

    def named(self, names: Mapping[str, str]) -> "SettingError":
        """Return it with the name that the field has elsewhere: `engine's name -> name there`."""
        return SettingError(names.get(self.field, self.field), self.reason)


class ContextLengthError(ValueError):
    """A prompt, or prompt and max_tokens together, that no context can hold.

    The beginning of the message is OpenAI's: agents look for it.

    Args:
        limit: tokens that the context holds.
        num_tokens: of the prompt; or of its beginning, if that is too long already.
        max_tokens: that were asked for; None: the prompt alone is too long.
        is_whole: `num_tokens` counts the whole prompt.
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
            return f"{beginning}, however {has}: shorten the prompt, so that an answer fits, too"
        total = self.num_tokens + self.max_tokens
        return (
            f"{beginning}, however you requested {total} tokens ({self.num_tokens} in the prompt, "
            f"{self.max_tokens} by max_tokens): shorten the prompt or ask for "
            f"{self.limit - self.num_tokens} at most"
        )


class NoEmbeddingsError(ValueError):
    """An engine that gives answers, and no embeddings."""


class EngineError(RuntimeError):
    """A request that the engine had to give up."""
