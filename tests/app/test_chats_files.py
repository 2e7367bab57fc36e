"""Files in and out of chats: export, import, attachments."""

import asyncio
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pypdf import PdfWriter

from neo_desktop.app.chats import attachments
from neo_desktop.app.errors import ApiError

from .chat_client import ChatClient, RefusedError, chats_file, message
from .conftest import running
from .fake_engine import FakeExecutor, make_engine


@pytest.fixture
def chats(executor: FakeExecutor, tmp_path: Path) -> Iterator[ChatClient]:
    with running(make_engine(executor, num_blocks=512), data_folder=tmp_path) as server:
        yield ChatClient(server.url)


def attach(chats: ChatClient, name: str, content: bytes) -> Any:
    return chats.call("attach", name, content.decode("latin-1"))


def make_pdf(*pages: str) -> bytes:
    """Return a handmade PDF with a line of text per page."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b""]
    kids = []
    for page in pages:
        stream = f"BT /F1 12 Tf 72 720 Td ({page}) Tj ET".encode()
        number = len(objects) + 1
        font = b"/Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>"
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] "
            + font
            + f" /Contents {number + 1} 0 R >>".encode()
        )
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream))
        kids.append(f"{number} 0 R")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>".encode()
    return as_pdf(objects)


def as_pdf(objects: list[bytes]) -> bytes:
    content = b"%PDF-1.4\n"
    starts = []
    for number, one in enumerate(objects, 1):
        starts.append(len(content))
        content += b"%d 0 obj\n%s\nendobj\n" % (number, one)
    table = len(content)
    content += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    content += b"".join(b"%010d 00000 n \n" % start for start in starts)
    trailer = b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n"
    return content + trailer % (len(objects) + 1, table)


def test_an_export_comes_back_exactly_with_all_branches(chats: ChatClient) -> None:
    chat_id = chats.new_chat(max_tokens=3, temperature=0.5, system_prompt="Be brief.")
    file = attach(chats, "notes.txt", "Ünïcode\n".encode())
    first = chats.answered(chat_id, "one 💡", attachment_ids=[file["id"]])
    chats.answered(chat_id, "two", first["id"])
    chats.ended(chats.call("retry", first["id"]))
    chats.answered(chat_id, "edited")
    chats.call("show", chat_id, first["id"])
    chats.call("rename", chat_id, "A *title* / with: signs")
    exported = chats.call("export", chat_id)
    (imported,) = chats.call("add", exported.encode().decode("latin-1"))
    assert imported != chat_id
    assert chats.call("export", imported) == exported
    assert len(chats.chat(imported)["nodes"]) == 7
    everything = chats.call("export", None)
    assert json.loads(everything)["chats"] == json.loads(exported)["chats"] * 2
    chats.call("add", everything.encode().decode("latin-1"))
    assert len(chats.titles()) == 4
    assert len(chats.titles("edited")) == 4  # the search finds imported texts


def test_markdown_shows_the_branch_that_is_shown(chats: ChatClient) -> None:
    chat_id = chats.new_chat(max_tokens=3)
    chats.answered(chat_id, "hidden")
    answer = chats.answered(chat_id, "shown")
    text = chats.call("export", chat_id, as_markdown=True)
    assert text == f"# hidden\n\n## Question\n\nshown\n\n## Answer (alphabet)\n\n{answer['text']}\n"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"[" * 100_000, "Invalid JSON"),
        (b"{}", "format"),
        ({"format": "neo-desktop chats", "version": 2, "chats": []}, "version"),
        (chats_file(message("user", "a")), "parent"),
        (chats_file(message("user", "b")), "parent"),
        (chats_file(message("user"), message("assistant", "a")), "parent"),  # two of one id
        (chats_file(message("assistant")), "no answer to one"),
        (chats_file(message("user"), message("user", "a", id="b")), "follows a question"),
        (chats_file(message("user"), leaf_id="b"), "leaf"),
        (chats_file(message("user", state="streaming")), "state"),
        (chats_file(message("system")), "role"),
        (chats_file(message("user", created_s=1e300)), "created_s"),
        (chats_file(message("user", server="1' OR 1")), "server"),
        (chats_file(settings={"seed": 2**70}), "seed"),
        (chats_file(settings={"sed": 1}), "sed"),
        (chats_file(entry={"title": "t" * 10_001}), "title"),
        (b'{"format": "neo-desktop chats", "version": 1, "chats": [{"leaf_id": "\\ud800"}]}', ""),
        (json.dumps(chats_file(entry={"updated_s": float("nan")})).encode(), ""),
    ],
)
def test_a_hostile_import_is_refused_as_a_whole(chats: ChatClient, body: Any, reason: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(RefusedError, match=re.escape(reason)) as refused:
        chats.call("add", content.decode("latin-1"))
    assert refused.value.kind == "ValidationError"
    assert chats.titles() == []


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("héllo 你好\r\nworld\r".encode(), "héllo 你好\nworld\n"),
        ("with a mark".encode("utf-8-sig"), "with a mark"),
        ("from Windows ü".encode("utf-16"), "from Windows ü"),
        ("old Windows “ü”".encode("cp1252"), "old Windows “ü”"),
    ],
)
def test_texts_are_read_in_their_encoding(
    chats: ChatClient, page_prompts: list[str], content: bytes, text: str
) -> None:
    file = attach(chats, "../../etc/no\x00tes\n.txt", content)
    assert (file["name"], file["kind"], file["text"]) == ("notes.txt", "text", text)
    chat_id = chats.new_chat(max_tokens=1)
    question, answer = chats.ask(chat_id, "Sum it up.", attachment_ids=[file["id"]])
    assert question["attachments"] == [file]
    chats.ended(answer)
    assert page_prompts == [f"[File: notes.txt]\n{text.strip()}\n[End of file]\n\nSum it up."]


@pytest.fixture
def page_prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts' last user messages, as the model receives them."""
    from neo_desktop.app.chats import answers  # noqa: PLC0415

    asked: list[str] = []
    to_send = answers.to_send

    def listen(*args: Any) -> Any:
        turns = to_send(*args)
        asked.append(turns[-1]["content"])
        return turns

    monkeypatch.setattr(answers, "to_send", listen)
    return asked


def test_a_pdf_is_read(chats: ChatClient) -> None:
    file = attach(chats, "paper.pdf", make_pdf("The first page", "The second page"))
    assert (file["kind"], file["text"]) == ("pdf", "The first page\n\nThe second page")


def locked_pdf() -> bytes:
    writer = PdfWriter()
    writer.add_blank_page(100, 100)
    writer.encrypt("secret", algorithm="RC4-128")
    content = io.BytesIO()
    writer.write(content)
    return content.getvalue()


def pdf_bomb() -> bytes:
    """Return a PDF page with 4 GB of zeros, deflated four times."""
    stream = zlib.compress(bytes(1 << 26), 9)
    stream = zlib.compress(stream, 9)
    filters = b"[" + b"/FlateDecode " * 2 + b"]"
    page = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents [" + b"4 0 R " * 64 + b"] >>"
    return as_pdf(
        [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            page,
            b"<< /Length %d /Filter %s >>\nstream\n%s\nendstream" % (len(stream), filters, stream),
        ]
    )


@pytest.mark.parametrize(
    ("name", "content", "status", "reason"),
    [
        ("picture.png", b"\x89PNG\r\n\x1a\n" + bytes(100), 415, "picture.png cannot be used: the image is"),
        ("picture.bmp", b"BM" + bytes(100), 415, "picture.bmp is neither text, a PDF nor an image"),
        ("empty.txt", b" \n", 415, "empty.txt is empty"),
        ("big.txt", b"x" * (attachments.MAX_FILE_BYTES + 1), 413, "20 MiB"),
        ("long.txt", b"x" * (attachments.MAX_TEXT_CHARS + 1), 413, "2,000,000 is the limit"),
        ("broken.pdf", b"%PDF-1.7\n" + b"garbage" * 100, 415, "broken.pdf"),
        ("scan.pdf", make_pdf(""), 415, "holds no text"),
        ("locked.pdf", locked_pdf(), 415, "protected by a password"),
    ],
)
def test_what_cannot_be_read_says_why(name: str, content: bytes, status: int, reason: str) -> None:
    with pytest.raises(ApiError, match=re.escape(reason)) as refused:
        asyncio.run(attachments.read_file(name, content, asyncio.Semaphore(1)))
    assert refused.value.status == status


def test_a_reader_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reader = tmp_path / "reader"
    reader.write_text("#!/bin/sh\nexec sleep 600\n")
    reader.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(reader))
    monkeypatch.setattr(attachments, "PDF_TIMEOUT_S", 0.5)
    with pytest.raises(ApiError, match="takes too long to read"):
        asyncio.run(attachments.read_file("paper.pdf", make_pdf("A page"), asyncio.Semaphore(1)))
    assert "sleep" not in {child.name() for child in psutil.Process().children()}


def test_a_pdf_bomb_costs_little_and_the_server_lives_on(chats: ChatClient) -> None:
    with pytest.raises(RefusedError, match=r"bomb\.pdf"):
        attach(chats, "bomb.pdf", pdf_bomb())
    assert attach(chats, "paper.pdf", make_pdf("The first page"))["text"] == "The first page"
