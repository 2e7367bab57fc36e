"""Python processes forked from a server that has imported torch: a start takes 0.1 s instead of four.

Inside `quick_processes`, `subprocess.Popen` starts this project's programs that way. They are ordinary
children of the caller, with their own arguments, environment, folder and streams. A program starts as usual
if its environment differs in a variable that libraries read on import. The same holds for children of these
children.

The caller sends program, environment and streams to the server. The server forks a process that forks the
child and ends. The server then returns the child's number to the caller.

The caller adopts orphaned children (a subreaper, in Linux) until it has the number.

Workers of pytest-xdist start the same way, from a server that has also collected the tests: one process
imports what all workers need. Each worker gets a server of its own, forked before the worker starts.
"""

import atexit
import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(sys.executable).with_name("neo-desktop")
_PRELOADED = (
    "gradio", "neo_desktop.app.bench.run", "neo_desktop.app.cli", "neo_desktop.app.commands.doctor_command",
    "neo_desktop.app.commands.serve_command", "neo_desktop.app.engines.child", "torch",
)  # fmt: skip
_USED_BY_EXPORTS = "torch._dynamo.symbolic_convert", "torch.export._trace"
# Libraries read these at import.
_READ_EARLY = (
    "CUDA", "GRADIO", "HF_", "LD_", "MKL", "NEO_DESKTOP_LEVEL", "OMP", "OPENBLAS", "PYTHON", "TORCH",
    "TRITON",
)  # fmt: skip
# The page, the engine and torch set these anew in every process.
_SET_LATER = ("GRADIO_TEMP_DIR", "HF_HUB_DISABLE_TELEMETRY", "OMP_WAIT_POLICY", "TORCHINDUCTOR_CACHE_DIR")
_PROFILE_S = 0.05  # predictions change the speed, never an answer
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_MESSAGE_BYTES = 1 << 18
_WORKER = "import sys;exec(eval(sys.stdin.readline()))"  # the program that pytest-xdist starts
_SERVER_OF_WORKER = "NEO_DESKTOP_TEST_SERVER"  # connection and number of its process


@dataclass(frozen=True)
class _Program:
    arguments: list[str]  # sys.argv
    code: str | None  # None: the command line
    folder: str
    environment: dict[str, str]
    is_session: bool


def _early(environment: dict[str, str]) -> dict[str, str]:
    early = {name: value for name, value in environment.items() if name.startswith(_READ_EARLY)}
    return {name: value for name, value in early.items() if name not in _SET_LATER}


class _Server:
    """The forking process, and the connection to it.

    Args:
        collected: arguments of pytest for the tests that the server imports; None: no tests.
    """

    def __init__(self, collected: Sequence[str] | None = None) -> None:
        self._lock = threading.Lock()
        self.early = _early(dict(os.environ))
        if ready := os.environ.pop(_SERVER_OF_WORKER, None):
            link, number = map(int, ready.split())
            self._link = socket.socket(fileno=link)
            self._wait: Callable[[], object] = partial(os.waitpid, number, 0)
            return
        self._link, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with others:
            self._wait = _POPEN(
                [sys.executable, "-P", __file__, str(others.fileno()), json.dumps(collected)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[others.fileno()],
            ).wait

    def start(self, program: _Program, streams: list[int]) -> int:
        """Start a child of this process; return its number."""
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            prctl(_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._link, [json.dumps(asdict(program)).encode()], streams)
                if not (number := self._link.recv(64)):
                    raise RuntimeError("the forking server ended: its error is in the output above")
                return int(number)
            finally:
                prctl(_SUBREAPER, 0, 0, 0, 0)

    def close(self) -> None:
        self._link.close()
        self._wait()


_POPEN = subprocess.Popen
_servers: list[_Server] = []  # at most one


class _QuickPopen(_POPEN):  # type: ignore[type-arg]
    def _execute_child(self, *given: Any) -> None:
        """Start the child; parameters as in the standard library's method of this name."""
        names = _POPEN._execute_child.__code__.co_varnames  # type: ignore[attr-defined]
        by_name = dict(zip(names[1:], given, strict=False))
        program = _program_of(by_name)
        if program is None:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        if not _servers:
            _servers.append(_Server())
        if _early(program.environment) != _servers[0].early:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        pipes = [by_name[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        self.pid = _servers[0].start(program, [i if pipe == -1 else pipe for i, pipe in enumerate(pipes)])
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(by_name[end] for end in ends))  # type: ignore[attr-defined]


def _program_of(given: dict[str, Any]) -> _Program | None:
    """Return the program of a command of this project; None for other commands."""
    if isinstance(given["args"], str | bytes | os.PathLike) or given["preexec_fn"] or given["pass_fds"]:
        return None
    code = None
    match [os.fspath(each) for each in given["args"]]:
        case [first, *rest] if first == str(PROGRAM):
            arguments = [first, *rest]
        case [sys.executable, "-m", "neo_desktop.app.entry", *rest]:
            arguments = ["neo-desktop", *rest]
        case [sys.executable, "-u", "-c", code] if code == _WORKER:
            arguments = ["-c"]
        case [sys.executable, "-P", "-c", code, *rest]:
            arguments = ["-c", *rest]
        case [sys.executable, str(file), *rest] if file.endswith(".py"):
            arguments = [file, *rest]
            code = f"import runpy; runpy.run_path({file!r}, run_name='__main__')"
        case _:
            return None
    environment = dict(os.environ if given["env"] is None else given["env"])
    folder = os.fspath(given["cwd"] or Path.cwd())
    return _Program(arguments, code, folder, environment, bool(given["start_new_session"]))


def profile_briefly() -> None:
    """Let engines of small models measure this computer for less time than usual."""
    from neo_desktop.engine.profiling import profiler  # noqa: PLC0415 - not before the environment is set

    profiler.MIN_SECONDS = _PROFILE_S


@contextmanager
def quick_processes(collected: Sequence[str] | None = None) -> Iterator[None]:
    """Start programs of this project as described above.

    Args:
        collected: arguments of pytest for the tests that programs import at once; None: no tests.
    """
    subprocess.Popen = _QuickPopen  # type: ignore[misc]
    if collected is not None or _SERVER_OF_WORKER in os.environ:
        _servers.append(_Server(collected))
    try:
        yield
    finally:
        subprocess.Popen = _POPEN  # type: ignore[misc]
        while _servers:
            _servers.pop().close()


def _next_child(link: socket.socket) -> _Program:
    """Fork children until the caller ends; return in each child."""
    while True:
        message, streams, _, _ = socket.recv_fds(link, _MESSAGE_BYTES, 3)
        if not message:
            os._exit(0)
        told, tell = os.pipe()
        middle = os.fork()
        if middle == 0:
            if os.fork():
                os._exit(0)
            program = _Program(**json.loads(message))
            if program.is_session:
                os.setsid()  # before the caller knows the number, because it may kill the session at once
            os.write(tell, str(os.getpid()).encode())
            for each in (told, tell):
                os.close(each)
            link.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            return program
        os.waitpid(middle, 0)
        link.send(os.read(told, 64))
        for each in (told, tell, *streams):
            os.close(each)


def _server_of_worker() -> str:
    """Fork a server for the programs of this process, a worker; return its connection and number."""
    link, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = os.fork()
    if server == 0:
        link.close()
        with open(os.devnull, "r+b") as nothing:  # the worker's own streams end with it
            for number in (0, 1):
                os.dup2(nothing.fileno(), number)
        _run(_next_child(others))
    others.close()
    return f"{link.detach()} {server}"


class _Forgetful:
    """Drops modules that were skipped while they were imported: workers skip them with the reason."""

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        if not report.passed:
            for name, module in list(sys.modules.items()):
                if getattr(module, "__file__", None) == str(collector.path):
                    del sys.modules[name]
        return report


def main() -> None:
    """Run the server; in a child, run its program."""
    own_path = list(sys.path)
    for name in _PRELOADED:
        __import__(name)
    if (collected := json.loads(sys.argv[2])) is not None:
        for name in _USED_BY_EXPORTS:
            __import__(name)
        if pytest.main([*collected, "-n0", "--collect-only", "-q"], [_Forgetful()]):
            # Start again without the tests: each worker reports the error.
            os.execv(sys.executable, [sys.executable, "-P", __file__, sys.argv[1], "null"])
    sys.path[:] = own_path
    profile_briefly()
    assert threading.active_count() == 1, "threads do not survive a fork"
    gc.collect()
    gc.freeze()
    program = _next_child(socket.socket(fileno=int(sys.argv[1])))
    if program.code == _WORKER:
        program.environment[_SERVER_OF_WORKER] = _server_of_worker()
    _run(program)


def _run(program: _Program) -> None:
    """Run a program in this process, and end the process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(program.folder)
    os.environ.clear()
    os.environ.update(program.environment)
    sys.argv[:] = program.arguments
    status = 0
    try:
        if program.code is None:
            runpy.run_module("neo_desktop.app.entry", run_name="__main__", alter_sys=True)
        else:
            exec(program.code, {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)  # an orderly teardown of the imports would take half a second


if __name__ == "__main__":
    main()
