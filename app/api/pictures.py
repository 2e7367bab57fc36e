"""Pictures in the bodies of requests: as data, never as addresses of other servers."""

import base64
import binascii
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from neo_desktop.app.api.fields import NOT_TEXT, Json, Model, RefusalPart, Tagged, TextPart, content
from neo_desktop.app.generate.images import MAX_IMAGE_BYTES, image_part
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


Data = Annotated[bytes, PlainValidator(_picture, json_schema_input_type=str)]
DataUrl = Annotated[bytes, PlainValidator(_picture_of_url, json_schema_input_type=str)]


class ImageUrl(Model):
    url: DataUrl


class ImageUrlPart(Model):
    """An image as OpenAI's chats have it."""

    type: Literal["image_url"]
    image_url: ImageUrl

    @property
    def part(self) -> Json:
        return image_part(self.image_url.url)


class InputImagePart(Model):
    """An image as OpenAI's responses have it."""

    type: Literal["input_image"]
    image_url: DataUrl

    @property
    def part(self) -> Json:
        return image_part(self.image_url)


class Base64Source(Model):
    type: Literal["base64"]
    media_type: Annotated[str, Field(max_length=100)]  # the file itself says what it is
    data: Data


class ImageBlock(Model):
    """An image as Anthropic's messages have it."""

    type: Literal["image"]
    source: Annotated[Base64Source, Tagged(refused=dict.fromkeys(("url", "file"), _FETCHES_NOTHING))]

    @property
    def part(self) -> Json:
        return image_part(self.source.data)


ContentWithImages = Annotated[
    str | list[Any],
    content(Annotated[TextPart | RefusalPart | ImageUrlPart | InputImagePart, Tagged(refused=NOT_TEXT)]),
]
