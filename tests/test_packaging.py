"""The installed packages suffice: for the engine as a library, and for the commands."""

import ast
import subprocess
import sys
import textwrap
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
FROM_TORCH = {"triton"}  # comes with torch's builds for CUDA
# Top-level module name -> the installed packages that provide it.
DISTRIBUTIONS = {
    module: {canonicalize_name(name) for name in names} for module, names in packages_distributions().items()
}


def names(requirements: list[str]) -> set[str]:
    """Return the packages of a list of requirements, with this project's extras expanded."""
    found = set()
    for requirement in map(Requirement, requirements):
        if requirement.name == PROJECT["name"]:
            found |= names([one for extra in requirement.extras for one in EXTRAS[extra]])
        else:
            found.add(canonicalize_name(requirement.name))
    return found


LIBRARY = names(PROJECT["dependencies"])


def run(program: str, extras: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program that can import only the packages of the library and of these extras."""
    there = LIBRARY | names([one for extra in extras for one in EXTRAS[extra]])
    there |= {"httpx"} if "gradio" in there else set()  # gradio requires it
    blocked = names([one for all_ in EXTRAS.values() for one in all_]) - there
    modules = {module for module, packages in DISTRIBUTIONS.items() if packages and packages <= blocked}
    assert {"matplotlib", "playwright"} - there <= modules
    hook = f"""
        import sys
        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {sorted(modules)!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        sys.meta_path.insert(0, Blocked())
    """
    text = textwrap.dedent(hook) + textwrap.dedent(program)
    return subprocess.run(
        [sys.executable, "-c", text, *arguments], capture_output=True, text=True, timeout=250, check=False
    )


def imports(file: Path) -> set[str]:
    """Return the top-level names of the modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found - sys.stdlib_module_names - {"neo_desktop", "cuda"} - FROM_TORCH


@pytest.mark.parametrize(
    ("folders", "extras", "optional"),
    [
        (
            ["engine", "models", "native"],
            [],
            {"llguidance", "ray", "transformers", "networkx", "PIL"},
        ),
        (["app", "ui"], ["server", "llamacpp", "mcp"], set()),
    ],
)
def test_what_is_imported_is_declared(folders: list[str], extras: list[str], optional: set[str]) -> None:
    declared = LIBRARY | names([one for extra in extras for one in EXTRAS[extra]])
    of_llama_cpp = {"llama_cpp": {"llama-cpp-python"}}
    # Parts of pydantic, FastAPI, Jinja and mcp, which always come with them.
    declared |= (
        {"pydantic-core", "starlette", "typing-extensions", "markupsafe", "httpx2"} if extras else set()
    )
    missing = {
        (file.relative_to(ROOT).as_posix(), module)
        for folder in folders
        for file in (ROOT / folder).rglob("*.py")
        for module in imports(file) - optional
        if not (of_llama_cpp | DISTRIBUTIONS).get(module, {module}) & declared
    }
    assert not missing


def test_the_engine_generates_where_only_the_librarys_packages_are() -> None:
    program = """
        from neo_desktop import Engine, SamplingParams
        with Engine.from_pretrained("builtin", device="cpu") as engine:
            output = engine.generate(["Hello"], SamplingParams(max_tokens=4, temperature=0.0))[0]
            print(len(output.token_ids), output.finish_reason)
            try:
                engine.generate(["Hello"], SamplingParams(grammar="start: /a/"))
            except ValueError as error:
                print(error)
    """
    done = run(program, [])
    assert done.stderr == ""
    generated, about_grammars = done.stdout.splitlines()
    assert generated == "4 length"
    assert about_grammars == f"grammar needs llguidance: {sys.executable} -m pip install llguidance"


@pytest.mark.parametrize("command", ["serve", "info", "bench"])
def test_a_command_without_its_packages_says_what_to_install(command: str) -> None:
    done = run("from neo_desktop.app.entry import main; main()", [], command)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "pip install 'neo-desktop[server]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.sample(0)
@pytest.mark.parametrize("folder", ["app", "ui"])
def test_each_part_can_be_imported_with_the_servers_packages(folder: str) -> None:
    # Chats with tools need one more; `servers.py` imports this file when a server is on.
    files = sorted(set((ROOT / folder).rglob("*.py")) - {ROOT / "app/mcp/session.py"})
    modules = [
        ".".join(["neo_desktop", *file.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
        for file in files
    ]
    done = run(
        f"import importlib\nfor module in {modules!r}:\n    importlib.import_module(module)", ["server"]
    )
    assert done.returncode == 0, done.stderr


def test_tools_without_their_package_say_what_to_install(tmp_path: Path) -> None:
    program = """
        import asyncio, pathlib, sys
        from neo_desktop.app.mcp.config import McpError
        from neo_desktop.app.mcp.servers import McpServers
        from neo_desktop.app.news import News
        try:
            asyncio.run(McpServers(pathlib.Path(sys.argv[1]), News()).tools(["notes"]))
        except McpError as error:
            print(error)
    """
    done = run(program, ["server"], str(tmp_path))
    assert (
        done.stdout
        == f"tools of MCP servers need the package mcp: {sys.executable} -m pip install 'neo-desktop[mcp]'\n"
    )
