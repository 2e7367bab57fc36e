#!/usr/bin/env python3
"""A stand-in for llama.cpp's llama-server, with a model whose next token is the sum of all before it.

The environment variable FAKE_LLAMA_SERVER makes it fail.
"""

import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

VOCAB_SIZE = 257
MOST_SEQUENCES = 8  # that there is memory for
FAILURE = os.environ.get("FAKE_LLAMA_SERVER", "")


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


class Handler(BaseHTTPRequestHandler):
    num_refused = 2  # times that it is not ready yet

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, status: int, data: object) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        assert self.path == "/health"
        if Handler.num_refused:
            Handler.num_refused -= 1
            self.answer(503, {"error": {"message": "Loading model"}})
        else:
            self.answer(200, {"status": "ok"})

    def do_POST(self) -> None:
        assert self.path == "/completion"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["temperature"] == 0
        assert body["cache_prompt"] is False
        assert body["ignore_eos"] is True
        if FAILURE == "refuse":
            self.answer(500, {"error": {"message": "no room in KV"}})
        if FAILURE == "crash":
            signal.raise_signal(signal.SIGILL)
        if FAILURE == "die":
            print("out of GPU memory", flush=True)
            os._exit(7)
        if FAILURE == "hang":
            threading.Event().wait()
        tokens = list(body["prompt"])
        for _ in range(body["n_predict"]):
            tokens.append(sum(tokens) % VOCAB_SIZE)
        made = tokens[len(body["prompt"]) :]
        reply: dict[str, object] = {"tokens": made}
        if body["n_probs"]:
            top = [{"id": 300 + at, "logprob": -9.0} for at in range(1, body["n_probs"])]
            reply["completion_probabilities"] = [
                {"id": token, "logprob": -0.1, "top_logprobs": [{"id": token, "logprob": -0.1}, *top]}
                for token in made
            ]
        self.answer(200, reply)


def main() -> None:
    if "--version" in sys.argv:
        print("version: 1234 (fake)\nbuilt with nothing", file=sys.stderr)
        return
    if "--list-devices" in sys.argv:
        print("Available devices:\n  (none)")
        return
    with open(option("--model"), "rb") as file:
        assert file.read(4) == b"GGUF"
    if FAILURE == "crash at start":
        signal.raise_signal(signal.SIGSEGV)
    if FAILURE == "load" or (FAILURE == "memory" and int(option("--parallel")) > MOST_SEQUENCES):
        print(f"cannot {FAILURE}", file=sys.stderr)
        sys.exit(3)
    ThreadingHTTPServer((option("--host"), int(option("--port"))), Handler).serve_forever()


if __name__ == "__main__":
    main()
