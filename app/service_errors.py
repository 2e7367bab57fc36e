"""Why a request was not taken, or not finished."""


class ServiceError(RuntimeError):
    """A request that the service could not take or could not finish."""

    code = "unavailable"  # for programs


class ServiceBusyError(ServiceError):
    """The queue is full; the same request may succeed later."""

    code = "queue_full"


class ServiceStoppedError(ServiceError):
    """The service is stopping or has stopped."""

    code = "shutting_down"


class EngineFailedError(ServiceError):
    """The engine gave the request up."""

    code = "engine_failed"


class DeadEndError(EngineFailedError):
    """The grammar that the answer must follow allows nothing more."""

    code = "grammar_dead_end"


class EngineRestartingError(EngineFailedError):
    """The engine ended and is being started again; the same request may succeed later."""

    code = "engine_restarting"


class RequestTimeoutError(ServiceError):
    """The request took longer than it may."""

    code = "timeout"


class UnreadError(ServiceError):
    """Nobody read what was generated."""

    code = "unread"
