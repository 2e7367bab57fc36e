"""The command line from a user's view: real processes, exit codes, one clear line per error."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from checkpoints import save_checkpoint

from neo_desktop.engine.predict.cost_model import TableCostModel

PROGRAM = Path(sys.executable).parent / "neo-desktop"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("models") / "tiny-llama", "llama")


@contextmanager
def running(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and its address, once it answers."""
    process = subprocess.Popen(
        [PROGRAM, *arguments, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if address := re.search(r"API:\s+(http://\S+)/v1", line):
                yield process, address[1]
                break
        else:
            raise AssertionError(f"no address printed: {lines} {process.communicate()[1]}")
    finally:
        process.kill()
        process.wait()


def test_help_and_version() -> None:
    assert "chat" in run("--help").stdout
    for command in ("chat", "serve", "info", "bench", "doctor", "simulate"):
        result = run(command, "--help")
        assert result.returncode == 0
        assert "Example" in result.stdout
    assert re.fullmatch(r"neo-desktop \d+\.\d+\.\d+\n", run("--version").stdout)


def test_info_tells_hardware_and_versions(tmp_path: Path) -> None:
    result = run("info", "--json", tmp_path / "info.json")
    assert result.returncode == 0
    machine = json.loads((tmp_path / "info.json").read_text())
    assert machine["usable_cores"] >= 1
    assert machine["memory_bytes"] > 0
    assert machine["torch"] in result.stdout
    assert machine.keys() >= {"caches", "numa_nodes", "swap_bytes", "memory_limit_bytes", "gpus", "notes"}


SMALL = ("--shape", "tiny", "--device", "cpu", "--gpu-cache-tokens", "256", "--cpu-cache-tokens", "1024")


def test_measure_measures_once_and_tells_where_the_tables_are(tmp_path: Path) -> None:
    first = run("doctor", "--measure", *SMALL, "--json", tmp_path / "first.json")
    assert first.returncode == 0, first.stderr
    profiled = json.loads((tmp_path / "first.json").read_text())
    assert profiled["path"] in first.stdout
    assert TableCostModel.from_json(profiled["tables"]).num_layers == 2
    run("doctor", "--measure", *SMALL, "--json", tmp_path / "second.json")
    assert json.loads((tmp_path / "second.json").read_text()) == profiled
    run("doctor", "--measure", *SMALL, "--refresh", "--json", tmp_path / "third.json")
    assert json.loads((tmp_path / "third.json").read_text())["tables"] != profiled["tables"]


QUICK = ("--requests", "4", "--input", "20", "--output", "4", "--repeats", "1")


def test_bench_that_could_measure_nothing_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "page"
    result = run("bench", "--suite", "throughput", "--model", tmp_path / "nowhere", "--out", out)
    assert result.returncode != 0
    assert "nowhere" in result.stderr
    assert not out.exists()


def test_ctrl_c_ends_bench_with_what_it_has(tmp_path: Path) -> None:
    out = tmp_path / "page"
    endless = ("--suite", "throughput", *SMALL, *QUICK[:-1], "100000", "--policy", "gpu-only")
    command = [PROGRAM, "bench", *endless, "--out", out, "--progress-json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("requests" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=240)  # plots are slow on a busy machine
    assert process.returncode == 130
    assert "The run was ended during throughput" in " ".join(printed.split())
    assert not out.exists() or json.loads((out / "report.json").read_text())["interrupted"] == "throughput"


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "arguments",
    [
        ("--no-such-option",),
        ("fly",),
        ("serve", "--policy", "magic"),
        ("serve", "--port", "x"),
        ("chat", "--gpu-memory", "-1"),
        ("serve", "--gpu-slice", "0"),
        ("doctor", "--gpu-slice", "-8"),
        ("doctor", "--cpu-memory", "2"),
        ("bench", "--tensor-parallel", "2", "--suite", "throughput"),
        ("doctor", "--measure", "--cpu-memory", "0"),
        ("serve", "--cpu-cache-dtype", "int4"),
        ("bench", "--suite", "golf"),
        ("bench", "--requests", "0"),
    ],
)
def test_wrong_use_exits_with_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).returncode == 2


def test_an_open_address_without_a_key_is_wrong_use() -> None:
    result = run("serve", "--host", "0.0.0.0")
    assert result.returncode == 2
    assert "API key" in re.sub(r"[\s│]+", " ", result.stderr)


@pytest.mark.parametrize("origin", ["*", "localhost:3000"])
def test_an_origin_that_is_none_is_wrong_use(origin: str) -> None:
    result = run("serve", "--allow-origin", origin)
    assert result.returncode == 2
    assert "is not an origin" in re.sub(r"[\s│]+", " ", result.stderr)


def test_who_reads_no_more_gets_no_traceback() -> None:
    with subprocess.Popen([PROGRAM, "info"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        process.wait()


def test_options_of_the_server_reach_it(checkpoint: Path) -> None:
    access = ("--api-key", "secret", "--allow-origin", "app://notes")
    with running("serve", "--model", checkpoint, *access) as (_, address):
        answer = httpx.get(f"{address}/v1/models", headers={"Origin": "app://notes"}, timeout=30)
        assert answer.status_code == 401
        assert answer.headers["access-control-allow-origin"] == "app://notes"


def damage(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    if how == "no weights":
        weights.unlink()
    elif how == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif how == "garbled weights":
        weights.write_bytes(b"\xff" * 4096)
    elif how == "broken config":
        (folder / "config.json").write_text("{")
    elif how == "unknown architecture":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps(config | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
        )
    elif how == "no tokenizer":
        (folder / "tokenizer.json").unlink()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("how", "hint"),
    [
        ("no weights", "safetensors"),
        ("truncated weights", "model.safetensors"),
        ("garbled weights", "model.safetensors"),
        ("broken config", "config.json"),
        ("unknown architecture", "MambaForCausalLM"),
        ("no tokenizer", "tokenizer.json"),
    ],
)
def test_a_damaged_checkpoint_gets_one_clear_line(tmp_path: Path, how: str, hint: str) -> None:
    folder = save_checkpoint(tmp_path / "model", "llama")
    damage(folder, how)
    result = run("serve", "--model", folder, "--port", "0")
    assert result.returncode == 1
    assert hint in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.strip().count("\n") == 0


def test_a_busy_port_is_found_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "--port", str(port), "--model", "/no/such/model")
    assert result.returncode == 1
    assert f"127.0.0.1:{port} is in use" in result.stderr


@pytest.mark.parametrize("where", ["--no-engine-process", "--engine-process"])
def test_serve_answers_and_ctrl_c_tells_running_requests_and_exits_with_0(
    where: str, checkpoint: Path, tmp_path: Path
) -> None:
    timeline = tmp_path / "timeline.json"
    with running("serve", "--model", checkpoint, "--trace-timeline", timeline, where) as (process, address):
        children = psutil.Process(process.pid).children(recursive=True)
        body = {
            "model": "tiny-llama",
            "prompt": "hello",
            "max_tokens": 500,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGINT)
            rest = "\n".join(lines)
        assert "shutting down" in rest
        assert process.wait(timeout=60) == 0
    assert json.loads(timeline.read_text())
    assert psutil.wait_procs(children, timeout=60)[1] == []


def test_an_engine_process_ends_with_its_server_however_that_ends(checkpoint: Path) -> None:
    with running("serve", "--model", checkpoint, "--engine-process") as (process, address):
        children = psutil.Process(process.pid).children(recursive=True)
        assert any("neo_desktop.app.engines.child" in " ".join(each.cmdline()) for each in children)
        body = {"prompt": "hello", "max_tokens": 500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
            assert next(response.iter_lines()).startswith("data: ")
            process.kill()
        process.wait()
        _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []


@pytest.mark.sample(0)
def test_an_idle_server_uses_almost_no_cpu(checkpoint: Path) -> None:
    with running("serve", "--model", checkpoint) as (process, address):
        httpx.post(f"{address}/v1/completions", json={"prompt": "hello", "max_tokens": 4}, timeout=60)

        def cpu_s() -> float:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / 100

        before = cpu_s()
        time.sleep(3)
        assert cpu_s() - before < 0.15  # a polling or spinning thread would use 3 s
