"""Image files from strangers: checked from their headers, then decoded."""

import io
import warnings
from typing import Any

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_BEGINNINGS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")
MAX_PIXELS = 64_000_000  # decoded, some 200 MB


def is_picture(data: bytes) -> bool:
    """Return True if a file's first bytes are those of a supported format."""
    return data.startswith(_BEGINNINGS) or (data.startswith(b"RIFF") and data[8:12] == b"WEBP")


def open_picture(data: bytes) -> Any:
    """Open an image file and check its header; return a `PIL.Image`, not decoded yet.

    Raise ValueError if it is no image of a supported format, or too large.
    """
    from PIL import Image  # noqa: PLC0415 - only images need it

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the size is checked below
            picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise ValueError(f"the image has more than {MAX_PIXELS:,} pixels: make it smaller") from None
    except Exception:  # decoders raise many kinds of exceptions
        formats = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise ValueError(f"the image is not a readable {formats} file") from None
    if picture.width * picture.height > MAX_PIXELS:
        raise ValueError(
            f"the image has {picture.width} x {picture.height} pixels, but {MAX_PIXELS:,} is the limit: "
            "make it smaller"
        )
    return picture


def decode(data: bytes) -> Any:
    """Return an image file's first picture, upright and in RGB.

    Raises:
        ValueError: see `open_picture`; or the file is damaged.
    """
    from PIL import ImageOps  # noqa: PLC0415 - as above

    picture = open_picture(data)
    try:
        return ImageOps.exif_transpose(picture).convert("RGB")
    except Exception as error:  # decoders raise many kinds of exceptions
        raise ValueError(f"the image is damaged ({error})") from None
