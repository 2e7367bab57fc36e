"""Pictures in the bodies of requests: as data, never as addresses of other servers."""

import base64
import binascii
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from neo_desktop.app.api.fields import (
    HINT,
    NOT_TEXT,
    Json,
    Label,
    Model,
    Only,
    Parts,
    RefusalPart,
    Tagged,
    TextPart,
    Unsupported,
)
from neo_desktop.app.generate.images import IMAGE, MAX_IMAGE_BYTES, data_url, image_part, text_part
from neo_desktop.models.vision.pictures import open_picture

_DATA = "data:image/"
_FETCHES_NOTHING = "send the image itself as base64: this server fetches nothing"


def _picture(text: object) -> bytes:
    """Return the image file that base64 stands for."""
    if not isinstance(text, str):
        raise PydanticCustomError("image", "must be text")
    if len(text) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        limit = MAX_IMAGE_BYTES >> 20
        raise PydanticCustomError("image", "is too large: {limit} MiB is the limit", {"limit": limit})
    try:
        data = base64.b64decode(text, validate=True)
        open_picture(data)
    except binascii.Error:
        raise PydanticCustomError("image", "is not valid base64") from None
    except ValueError as error:
        raise PydanticCustomError("image", "cannot be used: {reason}", {"reason": str(error)}) from None
    return data


def _picture_of_url(url: object) -> bytes:
    head, comma, text = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not head.startswith(_DATA) or not head.endswith(";base64") or not comma:
        raise PydanticCustomError(
            "image", "must be a data URL (data:image/png;base64,...): this server fetches nothing"
        )
    return _picture(text)


_TEXT = WithJsonSchema({"type": "string"})
Data = Annotated[bytes, PlainValidator(_picture), _TEXT]
DataUrl = Annotated[bytes, PlainValidator(_picture_of_url), _TEXT]


class ImageUrl(Model):
    url: DataUrl
    detail: Label = None  # the model's own image processor decides


class ImageUrlPart(Model):
    """An image as OpenAI's chats have it."""

    type: Literal["image_url"]
    image_url: ImageUrl
    cache_control: Annotated[Json | None, HINT] = None
    prompt_cache_breakpoint: Annotated[Json | None, HINT] = None

    @property
    def part(self) -> Json:
        """The part for a `Conversation`."""
        return image_part(self.image_url.url)


class InputImagePart(Model):
    """An image as OpenAI's responses have it."""

    type: Literal["input_image"]
    image_url: DataUrl
    detail: Label = None
    file_id: Unsupported = None
    prompt_cache_breakpoint: Annotated[Json | None, HINT] = None

    @property
    def part(self) -> Json:
        """The part for a `Conversation`."""
        return image_part(self.image_url)


class Base64Source(Model):
    type: Literal["base64"]
    media_type: Annotated[str, Field(max_length=100)]  # the file itself says what it is
    data: Data


class ImageBlock(Model):
    """An image as Anthropic's messages have it."""

    type: Literal["image"]
    source: Annotated[
        Base64Source, Tagged(Base64Source, refused=dict.fromkeys(("url", "file"), _FETCHES_NOTHING))
    ]
    cache_control: Annotated[Json | None, HINT] = None
    transformations: Annotated[Any, Only([])] = None

    @property
    def part(self) -> Json:
        """The part for a `Conversation`."""
        return image_part(self.source.data)


ContentWithImages = Annotated[
    str | list[Any], Parts(TextPart, RefusalPart, ImageUrlPart, InputImagePart, refused=NOT_TEXT)
]


def shown_parts(content: str | list[Any], text_kind: str) -> list[Json]:
    """Return content as a client of OpenAI's responses reads it."""
    return [
        {"type": "input_image", "image_url": data_url(part[IMAGE])}
        if part["type"] == IMAGE
        else {"type": text_kind, "text": part["text"]}
        for part in (content if isinstance(content, list) else [text_part(content)])
    ]


def check_role(content: object, role: object) -> None:
    """Raise an error for images in a message that is not a user's."""
    if isinstance(content, list) and role != "user":
        raise PydanticCustomError("image", "has an image: only a user's message may have images")
