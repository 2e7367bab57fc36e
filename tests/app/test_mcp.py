"""MCP servers over stdio and HTTP: real servers, their failures, and their secrets."""

import asyncio
import json
import logging
import sys
import textwrap
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from neo_desktop.app.mcp import session
from neo_desktop.app.mcp.config import McpError, ServerConfig, read_config
from neo_desktop.app.mcp.servers import McpServers
from neo_desktop.app.news import News

from .mcp_server import SECRET, Notes, notes_server

NOON = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}


@pytest.fixture(scope="module")
def notes() -> Iterator[Notes]:
    with notes_server() as server:
        yield server


def write(folder: Path, **servers: object) -> None:
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": servers}))


def python(*args: str, **more: object) -> dict[str, object]:
    return {"command": sys.executable, "args": list(args), **more}


def with_servers(folder: Path, use: Callable[[McpServers], Coroutine[Any, Any, None]]) -> None:
    """Run a test's coroutine, then end all servers."""

    async def run() -> None:
        servers = McpServers(folder, News())
        try:
            await use(servers)
        finally:
            await servers.close()

    asyncio.run(run())


def test_a_published_server_runs_over_stdio_and_ends_with_the_program(tmp_path: Path) -> None:
    write(tmp_path, time=python("-m", "mcp_server_time"))
    children: list[psutil.Process] = []

    async def use(servers: McpServers) -> None:
        others = set(psutil.Process().children(recursive=True))
        tools = await servers.tools(["time"])
        assert {"get_current_time", "convert_time"} == {tool.name for tool in tools}
        assert tools[0].parameters["type"] == "object"
        result = await servers.call("time", "convert_time", NOON)
        assert json.loads(result.text)["target"]["datetime"].endswith("T21:00:00+09:00")
        failed = await servers.call("time", "convert_time", NOON | {"time": "noon"})
        assert failed.is_error
        assert servers.states()[0].tools == ("get_current_time", "convert_time")
        children.extend(set(psutil.Process().children(recursive=True)) - others)
        assert children

    with_servers(tmp_path, use)
    assert psutil.wait_procs(children, timeout=30)[1] == []


def test_streamable_http_with_headers(tmp_path: Path, notes: Notes, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, notes=notes.config | {"url": f"{notes.url}?key={SECRET}"}, closed={"url": notes.url})

    async def use(servers: McpServers) -> None:
        caplog.set_level(logging.DEBUG)
        assert "add" in {tool.name for tool in await servers.tools(["notes"])}
        assert (await servers.call("notes", "add", {"a": 1, "b": 2})).text == "3"
        failed = await servers.call("notes", "fail", {})
        assert failed.is_error
        assert "no luck" in failed.text
        assert SECRET not in failed.text
        with pytest.raises(McpError, match="401"):
            await servers.tools(["closed"])

    with_servers(tmp_path, use)
    own = [record.getMessage() for record in caplog.records if record.name.startswith(("mcp.client", "http"))]
    assert SECRET not in "".join(own)


DIES = """
    import os, sys
    from mcp.server.mcpserver import MCPServer
    print("no JSON, but my key: " + os.environ["API_KEY"], flush=True)
    server = MCPServer("dies")

    @server.tool()
    def die() -> str:
        print("my key is " + os.environ["API_KEY"], file=sys.stderr, flush=True)
        os._exit(3)

    @server.tool()
    def live() -> str:
        return "alive"

    server.run("stdio")
"""


def test_a_server_that_dies_says_its_last_words_without_secrets_and_starts_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    program = tmp_path / "dies.py"
    program.write_text(textwrap.dedent(DIES))
    write(tmp_path, dies=python(str(program), env={"API_KEY": SECRET}))

    async def use(servers: McpServers) -> None:
        await servers.tools(["dies"])
        with pytest.raises(McpError, match=r"failed at 'die': it ended\. It said last: .*my key is •••"):
            await servers.call("dies", "die", {})
        assert (await servers.call("dies", "live", {})).text == "alive"
        assert SECRET not in repr([servers.states(), read_config(servers.file)])

    with_servers(tmp_path, use)
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (
            {"command": "no-such-program"},
            "'notes' does not start: 'no-such-program' was not found",
        ),
        (
            python("-c", "import sys; sys.exit('no key ' + sys.argv[2])", "--api-key", SECRET),
            "does not start: it ended. It said last: no key •••$",
        ),
        (python("-c", "input(); print('hello'); input()"), "did not answer within 2 s after its start"),
        ({"url": f"http://127.0.0.1:1/mcp?key={SECRET}"}, "http://127.0.0.1:1 cannot be reached"),
        (None, "there is no MCP server 'notes'"),
    ],
)
def test_a_server_that_does_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: dict[str, object] | None, reason: str
) -> None:
    if "2 s" in reason:
        monkeypatch.setattr(session, "START_S", 2.0)
    write(tmp_path, **({"notes": server} if server else {}))

    async def use(servers: McpServers) -> None:
        with pytest.raises(McpError, match=reason) as refused:
            await servers.tools(["notes"])
        assert SECRET not in str(refused.value)
        assert [state.error for state in servers.states()] == [str(refused.value)] * bool(server)

    with_servers(tmp_path, use)


def test_a_call_has_a_time_limit_and_the_server_stays(
    tmp_path: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, notes=notes.config)

    async def use(servers: McpServers) -> None:
        await servers.tools(["notes"])
        monkeypatch.setattr(session, "CALL_S", 1.0)
        with pytest.raises(McpError, match="has not returned from 'slow' within 1 s"):
            await servers.call("notes", "slow", {})
        monkeypatch.undo()
        assert (await servers.call("notes", "add", {"a": 2, "b": 2})).text == "4"

    with_servers(tmp_path, use)


def test_secrets_are_hidden_by_their_names_and_other_values_stay() -> None:
    config = ServerConfig.model_validate(
        {
            "name": "a",
            "command": "x",
            "args": ("--api-key", SECRET, f"postgresql://bob:{SECRET}2@db/x"),
            "env": {"DEBUG": "true", "GITHUB_TOKEN": f"{SECRET}3"},
        }
    )
    hidden = config.without_secrets(f'{{"ok": true}} {SECRET} {SECRET}2 {SECRET}3')
    assert SECRET not in hidden
    assert '{"ok": true}' in hidden


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not JSON: .* line 1"),
        ("[]", "must hold"),
        ('{"mcpServers": {"a": 5}}', "must hold"),
        (
            f'{{"mcpServers": {{"a": {{"env": {{"K": "{SECRET}"}}}}}}}}',
            "mcpServers.a: needs either a command",
        ),
        (
            f'{{"mcpServers": {{"a": {{"command": "x", "args": "{SECRET}"}}}}}}',
            "mcpServers.a.args: Input should be",
        ),
        ('{"mcpServers": {"a": {"url": "file:///x"}}}', "mcpServers.a.url"),
        ('{"mcpServers": {"a": {"url": "http://x", "type": "sse"}}}', "only stdio and streamable HTTP"),
    ],
)
def test_a_file_that_is_wrong_says_where_without_its_secrets(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(text)
    with pytest.raises(McpError, match=reason) as refused:
        read_config(file)
    assert SECRET not in str(refused.value)
