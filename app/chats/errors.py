"""Errors of a user's requests to the chats."""


class NotFoundError(LookupError):
    """A chat, a message or a file does not exist; the message names it."""


class NotPossibleError(ValueError):
    """A request that makes no sense for this message; the text says why."""


class BeingAnsweredError(NotPossibleError):
    """An answer that is still being written cannot be followed or continued yet."""

    def __init__(self) -> None:
        super().__init__("the answer is still being written: wait for its end, or stop it")
