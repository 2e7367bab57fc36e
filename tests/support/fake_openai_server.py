"""A server that speaks just enough of OpenAI's API, and in all the ways that clients meet outside."""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKENS_PER_WORD = 3


@dataclass
class Behaviour:
    """What the server does; `bodies` collects what it was sent."""

    models: tuple[str, ...] = ("first", "second")
    api_key: str | None = None
    unknown_fields: frozenset[str] = frozenset()  # refused with HTTP 400
    ignored_fields: frozenset[str] = frozenset()  # taken, without any effect
    tokens_per_chunk: int = 1
    own_length: int = 2  # tokens of an answer that may end when it likes
    status: int = 200  # of completions, from the second on: the first is the probe
    ending: str = "complete"  # or: "hang up", "stop", "error", "garbage", of streams from the second on
    bodies: list[dict[str, Any]] = field(default_factory=list)


@contextlib.contextmanager
def fake_openai_server(behaviour: Behaviour) -> Iterator[str]:
    """Serve on a free port; gives the address without /v1."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:  # not on the terminal
            pass

        def do_GET(self) -> None:
            if self._may_enter():
                models = [{"id": name, "object": "model"} for name in behaviour.models]
                found = self.path == "/v1/models"
                self._answer(200 if found else 404, {"object": "list", "data": models} if found else {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            behaviour.bodies.append(body)
            unknown = sorted(behaviour.unknown_fields & body.keys())
            is_probe = len(behaviour.bodies) == 1
            if not self._may_enter():
                return
            if self.path != "/v1/completions":
                self._refuse(404, "there is nothing here")
            elif body["model"] not in behaviour.models:
                self._refuse(404, f"no model {body['model']}")
            elif unknown:
                self._refuse(400, f"{unknown[0]} is not a field")
            elif behaviour.status != 200 and not is_probe:
                self._refuse(behaviour.status, "this did not work out")
            else:
                self._stream(body, "complete" if is_probe else behaviour.ending)

        def _may_enter(self) -> bool:
            if behaviour.api_key in (None, self.headers["Authorization"].removeprefix("Bearer ")):
                return True
            self._refuse(401, "who are you?")
            return False

        def _stream(self, body: dict[str, Any], ending: str) -> None:
            known = {name: value for name, value in body.items() if name not in behaviour.ignored_fields}
            count = known["max_tokens"] if known.get("ignore_eos") else behaviour.own_length
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            if ending == "hang up":
                self.send_header("Content-Length", "100000")  # more than will come
            self.end_headers()
            self.close_connection = True
            for start in range(0, count, behaviour.tokens_per_chunk):
                self._event({"choices": [{"index": 0, "text": "la ", "finish_reason": None}]})
                if start and ending != "complete":
                    break
            if ending == "error":
                self._event({"error": {"message": "out of memory"}})
            elif ending == "garbage":
                self.wfile.write(b"data: {nothing\n\n")
            elif ending == "complete":
                self._event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
                if known.get("stream_options", {}).get("include_usage"):
                    prompt_tokens = TOKENS_PER_WORD * len(body["prompt"].split())
                    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count}
                    self._event({"choices": [], "usage": usage})
                self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, body: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")

        def _refuse(self, status: int, message: str) -> None:
            self._answer(status, {"error": {"message": message}})

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    class FakeServer(ThreadingHTTPServer):
        request_queue_size = 256
        daemon_threads = True

    server = FakeServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
