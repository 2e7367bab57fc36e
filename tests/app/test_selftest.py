"""The self-test as the page runs it, with a fake `neo-desktop bench`."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from neo_desktop.app.data_folder import data_folder
from neo_desktop.app.news import SELFTEST, News
from neo_desktop.app.selftest import MAX_REPORTS, SelfTest, SelfTestError
from neo_desktop.app.shelf.hosting import ModelHost

from .conftest import until

pytestmark = pytest.mark.anyio

TIMEOUT_S = 60

CHILD = """
import json, os, pathlib, signal, sys, time
arguments = sys.argv[1:]
folder = pathlib.Path(arguments[arguments.index("--out") + 1])
how = HOW

def report():
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.html").write_text("<p>" + str(arguments))

def step(share, what):
    print(json.dumps({"share": share, "what": what}), file=sys.stderr, flush=True)

assert arguments[0] == "bench" and "--progress-json" in arguments
print("a warning", file=sys.stderr)
step(0.25, "reading memory")
if how == "crash":
    sys.exit("error: there is no memory to measure on")
if how in ("wait", "deaf"):
    if how == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        (folder.parent / "new").write_text(str(os.getpid()))
        (folder.parent / "new").rename(folder.parent / "pid")  # a reader finds it whole
        while True:
            time.sleep(0.05)
    except KeyboardInterrupt:
        report()
        sys.exit(130)
step(1.0, "done")
report()
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEO_DESKTOP_DATA", str(tmp_path))


def reports_folder() -> Path:
    return data_folder() / "selftest"


def fake(how: str, news: News | None = None, host: ModelHost | None = None) -> SelfTest:
    command = (sys.executable, "-c", CHILD.replace("HOW", repr(how)))
    return SelfTest(news or News(), host or ModelHost(), reports_folder(), command)


@contextlib.asynccontextmanager
async def ended(selftest: SelfTest) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await selftest.close()


async def test_progress_is_told_and_the_report_is_there_and_after_a_restart_too() -> None:
    news = News()
    selftest, told = fake("well", news), [0.0]
    async with ended(selftest), asyncio.timeout(TIMEOUT_S):
        with news.follow(SELFTEST) as changed:
            selftest.start(["throughput", "hardware"])
            while selftest.running is not None:
                await changed.wait()
                changed.clear()
                told.append(1.0 if selftest.running is None else selftest.running.share)
    assert told == sorted(told)
    assert len(set(told)) > 1
    assert selftest.error is None
    (report,) = fake("well").reports()
    page = fake("well").page(report)
    assert page is not None
    assert "'--suite', 'hardware', '--suite', 'throughput'" in page.read_text()


async def test_only_one_runs_at_a_time_and_a_stop_keeps_what_was_measured() -> None:
    selftest = fake("wait")
    async with ended(selftest):
        selftest.start(["hardware"])
        with pytest.raises(SelfTestError, match="is running"):
            selftest.start()
        await until((reports_folder() / "pid").exists)
        await selftest.stop()
        assert selftest.running is None
        assert selftest.error is None
        assert len(selftest.reports()) == 1
        selftest.start(["load"])  # the next run may start


async def test_a_run_that_does_not_listen_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neo_desktop.app.selftest.STOP_TIMEOUT_S", 0.2)
    selftest = fake("deaf")
    async with ended(selftest):
        selftest.start()
        await until((reports_folder() / "pid").exists)
        await asyncio.wait_for(selftest.stop(), TIMEOUT_S)
        assert selftest.running is None


async def test_the_end_of_the_server_ends_the_run() -> None:
    selftest = fake("deaf")
    selftest.start()
    await until((reports_folder() / "pid").exists)
    await asyncio.wait_for(selftest.close(), TIMEOUT_S)
    pid = int((reports_folder() / "pid").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_a_crash_is_told_with_its_last_lines() -> None:
    selftest = fake("crash")
    async with ended(selftest):
        selftest.start()
        await until(lambda: selftest.running is None)
    assert "there is no memory to measure on" in (selftest.error or "")
    assert selftest.reports() == []


async def test_the_model_gives_its_memory_back_first() -> None:
    order = []

    class Host(ModelHost):
        async def rest(self) -> None:
            order.append(selftest.reports())

    selftest = fake("well", host=Host())
    async with ended(selftest):
        selftest.start()
        await until(lambda: selftest.running is None)
    assert order == [[]]
    assert len(selftest.reports()) == 1


async def test_old_reports_go_and_junk_is_ignored() -> None:
    for number in range(15):
        folder = reports_folder() / f"2025-01-{number + 1:02}-000000"
        folder.mkdir(parents=True)
        (folder / "report.html").write_text("old")
    (reports_folder() / "junk").write_text("x")
    selftest = fake("well")
    async with ended(selftest):
        selftest.start()
        await until(lambda: selftest.running is None)
    names = selftest.reports()
    assert len(names) == MAX_REPORTS
    assert names == sorted(names, reverse=True)
