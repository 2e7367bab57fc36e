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
    """A prompt, or prompt and max_tokens together, that no context can hold."""


class EngineError(RuntimeError):
    """A request that the engine had to give up."""
