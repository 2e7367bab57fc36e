"""Images of a conversation: taken out of its messages, and put into its prompt.

    parts ──taken_out──→ texts with a sign per image ──put_back──→ parts ──template──→ marks ──→ rows

Between the two, all messages are texts.
"""

from collections.abc import Iterable, Sequence

from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.errors import ApiError
from neo_desktop.engine.json_schema import Json
from neo_desktop.models.marks import SIGNS

MAX_IMAGES = 20  # of a conversation
MAX_IMAGE_BYTES = 20 << 20
SEEN = "user", "tool"  # roles of messages that may have images
IMAGE = "image"  # the type of a part of a message's content, as in chat templates


def image_part(data: bytes) -> Json:
    return {"type": IMAGE, IMAGE: data}


def text_part(text: str) -> Json:
    return {"type": "text", "text": text}


def joined(parts: Iterable[Json]) -> str | list[Json]:
    """Return content: text, a line per part; or parts, if there are images."""
    found: list[Json] = []
    for part in parts:
        if found and part["type"] == found[-1]["type"] == "text":
            found[-1] = text_part(f"{found[-1]['text']}\n{part['text']}")
        else:
            found.append(part)
    if any(part["type"] == IMAGE for part in found):
        return found
    return found[0]["text"] if found else ""


def taken_out(messages: Sequence[Json]) -> tuple[list[Json], list[bytes], str]:
    """Return messages with signs in place of images, the images, and the sign."""
    contents = [message.get("content") for message in messages]
    if not any(isinstance(content, list) for content in contents):
        return list(messages), [], ""
    parts = [part for content in contents if isinstance(content, list) for part in content]
    images = [part[IMAGE] for part in parts if part["type"] == IMAGE]
    texts = [content for content in contents if isinstance(content, str)]
    texts += [part["text"] for part in parts if part["type"] != IMAGE]
    sign = next((sign for sign in SIGNS if not any(sign in text for text in texts)), "")

    def written(content: str | list[Json] | None) -> str | None:
        if not isinstance(content, list):
            return content
        return "".join(sign if part["type"] == IMAGE else part["text"] for part in content)

    return [message | {"content": written(message.get("content"))} for message in messages], images, sign


def put_back(messages: Sequence[Json], sign: str) -> list[Json]:
    """Return messages with parts where they have signs, as chat templates expect images."""
    if not sign:
        return list(messages)
    return [
        message | {"content": _parts(message["content"], sign)}
        if sign in (message["content"] or "")
        else message
        for message in messages
    ]


def _parts(text: str, sign: str) -> list[Json]:
    parts: list[Json] = []
    for number, piece in enumerate(text.split(sign)):
        parts += [{"type": IMAGE}] * (number > 0)
        parts += [text_part(piece)] if piece else []
    return parts


def check_images(
    service: EngineService, messages: Sequence[Json], images: Sequence[bytes], field: str
) -> None:
    """Raise ApiError for images that the model cannot read, that are too many, or in another's message."""
    reason = None
    if images and service.blindness:
        reason = service.blindness
    elif len(images) > MAX_IMAGES:
        reason = f"{field} has {len(images)} images, but {MAX_IMAGES} is the limit"
    elif any(isinstance(each.get("content"), list) and each["role"] not in SEEN for each in messages):
        reason = f"{field} has an image elsewhere: only a user's message and a tool's result may have images"
    if reason is not None:
        raise ApiError(400, reason, param=field)
