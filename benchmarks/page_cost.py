"""Cost of the page in a real Chromium: `python benchmarks/page_cost.py`.

Prints the time from program start to the first page, the bytes of the first load, memory, and the time to
open 300 messages. Then follow the gaps between frames while an answer grows at 120 tokens/s, and the
processor time of server and browser: idle and with answers of 60 tokens/s, with one page and with eight.

The server's engine is a stand-in that writes a word 60 times a second per request, to isolate the page's
cost. Every run's last line is the cost without a page.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).parent.parent
RATE = 60  # tokens/s
SECONDS = 20
PORT = "--remote-debugging-port=7980"
BOX = "#question textarea"
SERVER = """
import sys, time, pathlib
sys.path[:0] = [{root!r}, {root!r} + "/tests/support"]
from tests.app.conftest import running
from tests.app.fake_engine import ScriptedExecutor, make_engine
from neo_desktop.ui.page import mount

class Paced(ScriptedExecutor):
    due_s = 0.0
    def _carry_out(self, plan):
        self.due_s = max(self.due_s + 1 / {rate}, time.monotonic() - 0.5)
        time.sleep(max(self.due_s - time.monotonic(), 0))
        return super()._carry_out(plan)

executor = Paced()
executor.answers = ["word " * 4000]
template = "{{% for message in messages %}}<{{{{ message.role }}}}>{{{{ message.content }}}}{{% endfor %}}<a>"
engine = make_engine(executor, num_blocks=65536, context_tokens=30_000, template=template)
with running(engine, data_folder=pathlib.Path({data!r}), mount=mount) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


def cpu_s(process: psutil.Process) -> float:
    """Return the processor time of a process and its children, in seconds."""
    total = 0.0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system
    return total


@contextlib.contextmanager
def server(rate: int = RATE) -> Iterator[tuple[psutil.Process, str]]:
    """Start a server; yield its process and address."""
    with tempfile.TemporaryDirectory() as data:
        code = SERVER.format(root=str(ROOT), data=data, rate=rate)
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            try:
                yield psutil.Process(process.pid), url
            finally:
                process.kill()


def start_to_page(browser: Any) -> dict[str, float]:
    """Return the seconds from the command to a page that accepts input, with the built-in model."""
    with tempfile.TemporaryDirectory() as data:
        begun_s = time.perf_counter()
        program = [sys.executable, "-m", "neo_desktop.app.entry", "chat", "--no-browser", "--port", "7981"]
        with subprocess.Popen(
            program, env=os.environ | {"NEO_DESKTOP_DATA": data}, stdout=subprocess.DEVNULL
        ) as process:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get("http://127.0.0.1:7981/", trust_env=False).status_code == 200:
                        break
                time.sleep(0.02)
            served_s = time.perf_counter() - begun_s
            page = browser.new_page()
            page.goto("http://127.0.0.1:7981/")
            expect(page.locator(BOX)).to_be_editable(timeout=60_000)
            shown_s = time.perf_counter() - begun_s
            time.sleep(10)
            memory = psutil.Process(process.pid).memory_info().rss / 2**20
            page.close()
            process.terminate()
    return {"served_s": served_s, "editable_s": shown_s, "rss_mib": memory}


def opened(browser: Any, url: str) -> tuple[Page, int, float]:
    """Return a page that accepts input, the bytes of its load, and the seconds."""
    context = browser.new_context()
    page = context.new_page()
    session = context.new_cdp_session(page)
    session.send("Network.enable")
    sizes: list[float] = []
    session.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    begun_s = time.perf_counter()
    page.goto(url)
    expect(page.locator(BOX)).to_be_editable(timeout=60_000)
    took_s = time.perf_counter() - begun_s
    page.wait_for_timeout(1500)
    return page, int(sum(sizes)), took_s


def is_browser(command: list[str] | None) -> bool:
    """True for the first process of this script's browser."""
    return command is not None and PORT in command and not any(part.startswith("--type=") for part in command)


FRAMES = """() => {
    window.gaps = []; window.shift = 0;
    new PerformanceObserver((list) => { for (const one of list.getEntries()) window.shift += one.value; })
        .observe({type: 'layout-shift'});
    let last = performance.now();
    const step = (now) => { window.gaps.push(now - last); last = now; requestAnimationFrame(step); };
    requestAnimationFrame(step);
}"""


def smoothness(browser: Any, url: str) -> str:
    """Return the gaps between frames, and the layout shift, while an answer grows for 10 s."""
    page = opened(browser, url)[0]
    page.locator(BOX).fill("hello")
    page.locator(BOX).press("Enter")
    page.wait_for_timeout(3000)
    page.evaluate(FRAMES)
    page.wait_for_timeout(10_000)
    gaps = sorted(page.evaluate("window.gaps")[1:])
    median, most = gaps[len(gaps) // 2], gaps[int(0.99 * len(gaps))]
    shift = page.evaluate("window.shift")
    page.close()
    return f"{median:.0f} ms, 99 % below {most:.0f} ms, longest {gaps[-1]:.0f} ms, layout shift {shift:.4f}"


def open_long(browser: Any, url: str) -> tuple[float, float]:
    """Return the seconds until the end of a chat with 300 long messages is visible.

    First with a new browser, then from the list of an open page.
    """
    part = "A sentence with **bold**, `code` and a list:\n\n- one\n- two\n\n```python\nx = 1\n```\n\n" * 5
    messages = [
        {
            "id": str(n),
            "chat_id": "",
            "parent_id": str(n - 1) if n else None,
            "role": "assistant" if n % 2 else "user",
            "created_s": 1,
            "text": f"{n} {part}",
        }
        for n in range(300)
    ]
    entry = {"id": "", "title": "long", "created_s": 1, "updated_s": 1}
    chat = {"entry": entry, "settings": {}, "leaf_id": "299", "messages": messages}
    body = json.dumps({"format": "neo-desktop chats", "version": 1, "chats": [chat]})
    (chat_id,) = httpx.post(f"{url}/test", json=["add", [body], {}], trust_env=False).json()["result"]
    took_s, chosen_s = [], []
    for _ in range(3):
        page = browser.new_page()
        begun_s = time.perf_counter()
        page.goto(f"{url}/?chat={chat_id}")
        expect(page.locator("#messages .bot").last).to_contain_text("299", timeout=30_000)
        took_s.append(time.perf_counter() - begun_s)
        page.locator("#new-chat").click()
        expect(page.locator("#messages .bot")).to_have_count(0)
        begun_s = time.perf_counter()
        page.locator("#chats a").first.click()
        expect(page.locator("#messages .bot").last).to_contain_text("299", timeout=30_000)
        chosen_s.append(time.perf_counter() - begun_s)
        page.close()
    return sorted(took_s)[1], sorted(chosen_s)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", PORT],
        )
        chrome = next(one for one in psutil.process_iter(["cmdline"]) if is_browser(one.info["cmdline"]))
        print("start", start_to_page(browser), flush=True)
        with server() as (_, url):
            first_s, chosen_s = open_long(browser, url)
            print(f"300 long messages: {first_s:.2f} s, from an open page {chosen_s:.2f} s", flush=True)
        with server(120) as (_, url):
            print(f"between frames at 120 tokens/s: {smoothness(browser, url)}", flush=True)
        for num_pages in (1, 8):
            with server() as (process, url):
                if num_pages == 1:
                    before = cpu_s(process)
                    time.sleep(SECONDS)
                    print(f"idle, no page: {(cpu_s(process) - before) / SECONDS:.2%} of a core", flush=True)
                pages = []
                for _ in range(num_pages):
                    page, size, took_s = opened(browser, url)
                    pages.append(page)
                print(f"{num_pages} pages: load {size:,} bytes, {took_s:.2f} s", flush=True)
                time.sleep(3)
                before, before_chrome = cpu_s(process), cpu_s(chrome)
                time.sleep(SECONDS)
                print(
                    f"idle, {num_pages} pages: server {(cpu_s(process) - before) / SECONDS:.2%}, "
                    f"browser {(cpu_s(chrome) - before_chrome) / SECONDS:.2%}",
                    flush=True,
                )
                for page in pages:
                    field = page.locator(BOX)
                    field.fill("hello")
                    field.press("Enter")
                time.sleep(3)
                before, before_chrome = cpu_s(process), cpu_s(chrome)
                time.sleep(SECONDS)
                server_s, chrome_s = cpu_s(process) - before, cpu_s(chrome) - before_chrome
                tokens = RATE * SECONDS * num_pages
                print(
                    f"streaming, {num_pages} pages: server {server_s / SECONDS:.1%} of a core, "
                    f"{server_s / tokens * 1e3:.3f} ms per token; browser {chrome_s / SECONDS:.1%}",
                    flush=True,
                )
                for page in pages:
                    page.close()
                time.sleep(2)
                before = cpu_s(process)
                time.sleep(SECONDS / 2)
                print(
                    f"the same without pages: server {(cpu_s(process) - before) / SECONDS * 2:.1%}",
                    flush=True,
                )
                print(f"memory {process.memory_info().rss / 2**20:.0f} MiB", flush=True)
        browser.close()


if __name__ == "__main__":
    main()
