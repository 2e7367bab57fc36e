"""Files that a question brings along, read here: what is kept is their text."""

import asyncio
import base64
import codecs
import json
import re
import subprocess
import sys

import anyio

from neo_desktop.app.chats.messages import Kind, NotPossibleError
from neo_desktop.app.errors import ApiError
from neo_desktop.models.vision.pictures import is_picture, open_picture

MAX_FILE_BYTES = 20 * 2**20
MAX_TEXT_CHARS = 2_000_000  # some 500,000 tokens: more than contexts hold
MAX_NAME_CHARS = 200
PDF_TIMEOUT_S = 60.0

MAX_PDF_READERS = 2  # each is a process

_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_BINARY = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]")  # texts hold white space and, from terminals, escapes


async def read_file(
    name: str, content: bytes, readers: asyncio.Semaphore, blindness: str = ""
) -> tuple[str, Kind, str]:
    """Return a file's name made fit, its kind, and its text or an image in base64.

    Args:
        readers: PDFs that may be read at the same time.
        blindness: the sentence that refuses images; empty: the model reads them.

    Raises ApiError: 413: it is too large; 415: it is of another kind, or holds no text.
    """
    name = _clean_name(name)
    if len(content) > MAX_FILE_BYTES:
        limit_mib = MAX_FILE_BYTES // 2**20
        raise ApiError(413, f"{name} has {len(content) / 2**20:.1f} MiB, but {limit_mib} MiB is the limit")
    if is_picture(content):
        return name, "image", await asyncio.to_thread(_picture, name, content, blindness)
    if b"%PDF-" in content[:1024]:
        kind: Kind = "pdf"
        text = await _pdf_text(name, content, readers)
        if not text.strip():
            raise ApiError(415, f"{name} holds no text: it may be scanned. Pictures cannot be read")
    else:
        kind = "text"
        text = await asyncio.to_thread(_plain_text, name, content)
        if not text.strip():
            raise ApiError(415, f"{name} is empty")
    if len(text) > MAX_TEXT_CHARS:
        raise ApiError(
            413, f"{name} holds {len(text):,} characters of text, but {MAX_TEXT_CHARS:,} is the limit"
        )
    return name, kind, text


def check_length(text: str) -> None:
    """Raise NotPossibleError for a text that is too long to be asked."""
    if len(text) > MAX_TEXT_CHARS:
        raise NotPossibleError(f"the text has {len(text):,} characters, but {MAX_TEXT_CHARS:,} is the limit")


def _clean_name(name: str) -> str:
    last = re.split(r"[/\\]", name)[-1]
    return " ".join("".join(char for char in last if char.isprintable()).split())[:MAX_NAME_CHARS] or "file"


def _picture(name: str, content: bytes, blindness: str) -> str:
    if blindness:
        raise ApiError(415, f"{name} is an image, but {blindness}")
    try:
        open_picture(content)
    except ValueError as error:
        raise ApiError(415, f"{name} cannot be used: {error}") from None
    return base64.b64encode(content).decode()


def _plain_text(name: str, content: bytes) -> str:
    encoding = next((encoding for bom, encoding in _BOMS if content.startswith(bom)), "utf-8")
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError:
        # The encoding of Windows before UTF-8. It accepts almost any bytes; the control characters tell.
        text = content.decode("cp1252", errors="replace")
    if _BINARY.search(text):
        raise ApiError(
            415, f"{name} is neither text, a PDF nor an image: attach text, for example copied from it"
        )
    return text.replace("\r\n", "\n").replace("\r", "\n")


async def _pdf_text(name: str, content: bytes, readers: asyncio.Semaphore) -> str:
    """Read a PDF in a process of its own, with little memory and time: PDFs are programs, and not ours."""
    program = [sys.executable, "-m", "neo_desktop.app.chats.pdf_text"]
    try:
        async with readers:
            with anyio.fail_after(PDF_TIMEOUT_S):  # cancels again until the process has been killed
                done = await anyio.run_process(program, input=content, stderr=subprocess.DEVNULL, check=False)
    except TimeoutError:
        raise ApiError(415, f"{name} takes too long to read: attach its text") from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:  # it ran out of memory or time
        raise ApiError(415, f"{name} is too large or too intricate to read: attach its text") from None
    if "error" in answer:
        raise ApiError(415, f"{name} {answer['error']}")
    return str(answer["text"])
