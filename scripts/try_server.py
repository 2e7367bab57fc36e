"""Starts the installed server with the built-in model and asks it something; see `scripts/wheel --test`."""

import asyncio
import json
import shutil

from server_process import answer, server


def main() -> None:
    assert shutil.which("c++") is None
    assert shutil.which("cc") is None
    question = {"messages": [{"role": "user", "content": "What is a KV cache?"}], "temperature": 0}
    with server() as (_, port):
        status, body = asyncio.run(answer(port, "POST", "/v1/chat/completions", question))
    assert status == 200, body
    print("The server answers:", json.loads(body)["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main()
