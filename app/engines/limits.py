"""Limits of clients."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """A client that exceeds a limit gets its value in the error."""

    max_body_bytes: int = 32 * 2**20  # of a request
    max_messages: int = 10_000  # of a chat
    max_queued_requests: int = 1024  # outputs that may wait for their first token at the same time
    request_timeout_s: float | None = None  # from a request's arrival to its last token; None: any time


DEFAULT_LIMITS = ServerLimits()
