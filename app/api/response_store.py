"""Responses that can be asked for again, and gone on with."""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from neo_desktop.app.api.fields import Json
from neo_desktop.app.api.response_items import Item
from neo_desktop.app.errors import ApiError

MAX_RESPONSES = 1000
MAX_STORED_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response with the whole conversation that led to it."""

    body: Json
    input_items: Sequence[Item]  # of its own request
    items: Sequence[Item]  # from the conversation's beginning to this answer

    @property
    def num_bytes(self) -> int:
        """About what it takes."""
        return len(json.dumps(self.body)) + sum(len(repr(item)) for item in self.items)


class ResponseStore:
    """In memory: the oldest ones make room, and all end with the server."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._num_bytes = 0

    def add(self, response: StoredResponse) -> None:
        num_bytes = response.num_bytes
        self._responses[response.body["id"]] = (response, num_bytes)
        self._num_bytes += num_bytes
        while len(self._responses) > MAX_RESPONSES or self._num_bytes > MAX_STORED_BYTES:
            _, (_, freed_bytes) = self._responses.popitem(last=False)
            self._num_bytes -= freed_bytes

    def get(self, response_id: str, field: str | None = None) -> StoredResponse:
        """Return a response.

        Raises:
            ApiError: there is none; `field` of the body names it.
        """
        if response_id not in self._responses:
            kept = f"the last {MAX_RESPONSES} are kept until the server ends, if there is room"
            message = f"there is no response {response_id!r}: {kept}"
            raise ApiError(404, message, param=field, code="response_not_found")
        self._responses.move_to_end(response_id)
        return self._responses[response_id][0]

    def item(self, item_id: str) -> Item:
        """Return an item of an answer by its id.

        Raises:
            ApiError: there is none.
        """
        for response, _ in reversed(self._responses.values()):
            for item in reversed(response.items):
                if getattr(item, "id", None) == item_id:
                    return item
        message = f"there is no item {item_id[:100]!r} in the responses that are stored: send the item itself"
        raise ApiError(400, message, param="input")

    def remove(self, response_id: str) -> None:
        """Forget a response.

        Raises:
            ApiError: there is none.
        """
        self.get(response_id)
        _, num_bytes = self._responses.pop(response_id)
        self._num_bytes -= num_bytes
