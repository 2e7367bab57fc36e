"""A server with the hub's API: listings, and files from any byte on."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Repositories by name, each as `file -> content`."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cuts: list[int] = field(default_factory=list)  # bytes of large files until each connection breaks
    ignores_ranges: bool = False
    damages: bool = False  # corrupts large files
    requests: list[tuple[str, str | None]] = field(default_factory=list)  # file and range
    url: str = ""


@contextmanager
def serve_hub(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve a hub from a thread; `hub.url` is its address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            if path.startswith("api/models/"):
                self._list(path.removeprefix("api/models/"))
            elif "/resolve/" in path:
                repository, _, rest = path.partition("/resolve/")
                self._send_file(repository, rest.partition("/")[2])
            else:
                self._refuse(404, "EntryNotFound")

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _list(self, name: str) -> None:
            if name not in hub.repositories:
                return self._refuse(404, "RepoNotFound")
            files = []
            for file, content in hub.repositories[name].items():
                entry: dict[str, object] = {"rfilename": file, "size": len(content), "blobId": _git(content)}
                if _is_large(file):
                    digest = hashlib.sha256(content).hexdigest()
                    entry["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 130}
                files.append(entry)
            body = json.dumps({"id": name, "sha": REVISION, "siblings": files}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return None

        def _send_file(self, repository: str, file: str) -> None:
            asked = self.headers.get("Range")
            hub.requests.append((file, asked))
            if repository in hub.gated:
                return self._refuse(403, "GatedRepo")
            content = hub.repositories[repository][file]
            start = 0 if asked is None or hub.ignores_ranges else int(asked[len("bytes=") :].split("-")[0])
            self.send_response(200 if start == 0 else 206)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            rest = content[start:]
            if _is_large(file):
                if hub.damages:
                    rest = bytes(255 - byte for byte in rest)
                if hub.cuts:
                    rest = rest[: hub.cuts.pop(0)]
                    self.close_connection = True
            self.wfile.write(rest)
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _is_large(file: str) -> bool:
    return file.endswith((".safetensors", ".gguf", ".bin"))


def _git(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
