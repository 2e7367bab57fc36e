"""Bodies that were compressed on their way."""

import zlib

from neo_desktop.app.errors import ApiError

ENCODINGS = ("gzip", "deflate")
_ANY_FORM = 32 + zlib.MAX_WBITS  # gzip and zlib


def inflate(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return the content of a compressed body.

    Raises:
        ApiError: 415 for other encodings, 413 above `max_bytes`, 400 for damaged data.
    """
    encoding = encoding.strip().lower().removeprefix("x-")
    if encoding in ("", "identity"):
        return body
    if encoding not in ENCODINGS:
        message = f"the body is encoded as {encoding[:40]!r}: send it as gzip, deflate or plain"
        raise ApiError(415, message, headers={"Accept-Encoding": ", ".join(ENCODINGS)})
    # Some clients leave the head of zlib's form out of what they call deflate.
    is_bare = encoding == "deflate" and body[:1] and (body[0] & 15) != zlib.DEFLATED
    reader = zlib.decompressobj(-zlib.MAX_WBITS if is_bare else _ANY_FORM)
    try:
        plain = reader.decompress(body, max_bytes + 1)
    except zlib.error:
        raise ApiError(400, f"the body is no valid {encoding}: send it anew, or plain") from None
    if len(plain) > max_bytes:
        raise ApiError(413, f"the body has more than {max_bytes / 2**20:g} MiB, which is the limit")
    if not reader.eof:
        raise ApiError(400, f"the body is no whole {encoding}: its end is missing")
    return plain
