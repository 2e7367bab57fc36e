"""Responses that a later request asks for or continues."""

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from neo_desktop.app.api.fields import Json
from neo_desktop.app.api.response_items import Item
from neo_desktop.app.errors import ApiError

MAX_RESPONSES = 1000
MAX_STORED_BYTES = 64 * 2**20


class StoredResponse(NamedTuple):
    """A response with the whole conversation that led to it."""

    body: Json
    items: Sequence[Item]  # from the conversation's beginning to this answer


class ResponseStore:
    """In memory: the oldest ones make room, and all end with the server."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes: dict[str, int] = {}  # about what each takes

    def add(self, response: StoredResponse) -> None:
        response_id = response.body["id"]
        self._responses[response_id] = response
        num_bytes = len(json.dumps(response.body)) + sum(len(repr(item)) for item in response.items)
        self._num_bytes[response_id] = num_bytes
        while len(self._responses) > MAX_RESPONSES or sum(self._num_bytes.values()) > MAX_STORED_BYTES:
            self.remove(next(iter(self._responses)))

    def get(self, response_id: str, field: str | None = None) -> StoredResponse:
        """Return a response; `field` of the body names it."""
        if response_id not in self._responses:
            kept = f"the last {MAX_RESPONSES} are kept until the server ends, if there is room"
            message = f"there is no response {response_id!r}: {kept}"
            raise ApiError(404, message, param=field, code="response_not_found")
        self._responses.move_to_end(response_id)
        return self._responses[response_id]

    def item(self, item_id: str) -> Item:
        """Return an item of an answer by its id."""
        for response in reversed(self._responses.values()):
            for item in reversed(response.items):
                if getattr(item, "id", None) == item_id:
                    return item
        message = f"there is no item {item_id[:100]!r} in the responses that are stored: send the item itself"
        raise ApiError(400, message, param="input")

    def remove(self, response_id: str) -> None:
        self.get(response_id)
        del self._responses[response_id], self._num_bytes[response_id]
