"""The page's files: what may be fetched, how, and under which rules they run."""

import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from neo_desktop.ui.page import STATIC, mount


@pytest.fixture
def client() -> TestClient:
    return TestClient(mount(FastAPI()))


FILES = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file())


@pytest.mark.parametrize("path", ["/", *(f"/static/{name}" for name in FILES)])
def test_every_file_is_served_with_its_type_and_the_rules(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    kinds = {
        ".js": "text/javascript",
        ".css": "text/css",
        ".svg": "image/svg+xml",
        "": "text/html",
        ".html": "text/html",
    }
    assert answer.headers["content-type"].startswith(kinds[Path(path).suffix])
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]


def test_a_file_is_sent_again_only_when_it_changed(client: TestClient) -> None:
    first = client.get("/static/app.js")
    assert first.headers["cache-control"] == "no-cache"  # asked for each time
    again = client.get("/static/app.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/static/app.js", headers={"If-None-Match": '"other"'}).status_code == 200
    assert client.head("/").content == b""


@pytest.mark.parametrize(
    "path",
    [
        "/static/../page.py",
        "/static/%2e%2e/page.py",
        "/static/..%2fpage.py",
        "/static/..%5cpage.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/static/app.js/",
        "/static/app.js%00.css",
        "/static/",
        "/static/nothing.js",
    ],
)
def test_nothing_else_is_reachable(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_the_page_names_nothing_outside_and_runs_nothing_inline() -> None:
    for name in FILES:
        text = (STATIC / name).read_text(encoding="utf-8")
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert addresses == set(), name
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", page)


def test_scripts_are_short_and_markup_enters_in_one_place() -> None:
    for path in STATIC.glob("*.js"):
        text = path.read_text(encoding="utf-8")
        assert ("innerHTML" in text) == (path.name == "dom.js"), path.name
        assert "outerHTML" not in text
        assert "insertAdjacentHTML" not in text
