"""Start the installed server with the built-in model and ask it a question; see `scripts/wheel --test`."""

import asyncio
import json
import shutil
from pathlib import Path

from neo_desktop import native
from scripts.server_process import answer, server


def main() -> None:
    assert shutil.which("c++") is None
    assert shutil.which("cc") is None
    flags = Path("/proc/cpuinfo").read_text().split()
    assert "avx2" in native.available_isas() or "avx2" not in flags, native.available_isas()
    question = {"messages": [{"role": "user", "content": "What is a KV cache?"}], "temperature": 0}
    with server() as (_, port):
        status, body = asyncio.run(answer(port, "POST", "/v1/chat/completions", question))
    assert status == 200, body
    print("The server answers:", json.loads(body)["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main()
