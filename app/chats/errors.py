"""What a person asked of the chats and cannot have."""


class NotFoundError(LookupError):
    """There is no such chat, message or file; the message says which."""


class NotPossibleError(ValueError):
    """What is asked for makes no sense for this message; the text says why."""


class BeingAnsweredError(NotPossibleError):
    """An answer that is still being written cannot be followed or continued yet."""

    def __init__(self) -> None:
        super().__init__("the answer is still being written: wait for its end, or stop it")
