"""Images that the model has read already, for the next turns of their chats."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from hashlib import blake2b

from neo_desktop.models.vision.prompt import SeenImage

MAX_BYTES = 256 << 20


class SeenImages:
    """The images used last, by their files."""

    def __init__(self) -> None:
        self._images: OrderedDict[bytes, SeenImage] = OrderedDict()
        self._nbytes = 0

    async def get(self, data: bytes, see: Callable[[], Awaitable[SeenImage]]) -> SeenImage:
        """Return a file's image; call `see` if it is unknown."""
        key = blake2b(data, digest_size=32).digest()
        if key not in self._images:
            image = await see()
            if key not in self._images:  # another request may have asked meanwhile
                self._images[key] = image
                self._nbytes += image.nbytes
        self._images.move_to_end(key)
        found = self._images[key]
        while self._nbytes > MAX_BYTES and len(self._images) > 1:
            _, oldest = self._images.popitem(last=False)
            self._nbytes -= oldest.nbytes
        return found
