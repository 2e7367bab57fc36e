"""Why a model could not be brought here."""


class PullError(RuntimeError):
    """The message says why."""


class PullStoppedError(PullError):
    """A person stopped it."""
