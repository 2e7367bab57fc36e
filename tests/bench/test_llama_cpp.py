"""llama.cpp as a rival: it gets the same weights, all requests, and says why where it cannot."""

import gc
import importlib.util
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_llama_server
import pytest
import torch
from dense_model import logits_of_all
from gguf_files import write_gguf as write_quantised
from gguf_models import CONFIGS, made
from matplotlib.figure import Figure
from suites import ignore, last, shown
from transformers import LlamaConfig, LlamaForCausalLM

from neo_desktop.app.bench.throughput import llama_cpp
from neo_desktop.app.bench.throughput.llama_cpp import LlamaCppBaseline, check_installed, program
from neo_desktop.app.bench.throughput.suite import ThroughputOptions, run_throughput
from neo_desktop.app.bench.throughput.workload import TOP_LOGPROBS, Workload
from neo_desktop.engine.simulation.workload import WorkloadRequest
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.gguf.writer import write_gguf

gguf = pytest.importorskip("gguf")
needs_llama_server = pytest.mark.skipif(program() is None, reason="llama-server is not installed")
SMALL = ThroughputOptions(
    shape="tiny",
    device="cpu",
    dtype="float32",
    cpu_cache_tokens=4096,
    input_tokens=40,
    output_tokens=12,
    num_requests=10,
    repeats=2,
)


@pytest.fixture
def fake_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The processes of the fake in place of llama-server; whatever happens, they end and no file is left."""
    processes: list[Any] = []
    start = llama_cpp.subprocess.Popen

    def started(*args: Any, **settings: Any) -> Any:
        processes.append(start(*args, **settings))
        return processes[-1]

    monkeypatch.setattr(llama_cpp.subprocess, "Popen", started)
    monkeypatch.setenv("LLAMA_SERVER", fake_llama_server.__file__)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    yield processes
    assert not list(temporary.iterdir()), "the file with the weights is left"
    assert all(process.poll() is not None for process in processes), "the server is left"


def test_a_full_disk_is_told_before_anything_is_measured(
    fake_server: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(OSError, match=r"temporary file of 0\.0 GB, but .* TMPDIR"):
        last(run_throughput(replace(SMALL, llama_cpp=True), ignore))


def test_what_is_missing_is_told_with_what_to_install(
    fake_server: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_installed()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs gguf: pip install 'neo-desktop\[llama"):
        check_installed()
    monkeypatch.setenv("LLAMA_SERVER", "/nowhere/llama-server")
    with pytest.raises(ValueError, match="llama-server on the PATH"):
        replace(SMALL, llama_cpp=True)


def test_llama_cpp_takes_its_turns_when_our_model_is_gone(
    fake_server: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[weakref.ref[Decoder]] = []
    take, turns = LlamaCppBaseline.take, LlamaCppBaseline.turns

    def watched_take(self: LlamaCppBaseline, setup: Any, *args: Any) -> None:
        models.append(weakref.ref(setup.model.decoder))
        take(self, setup, *args)

    def watched_turns(self: LlamaCppBaseline, progress: Any) -> Any:
        gc.collect()
        assert models[0]() is None
        return turns(self, progress)

    monkeypatch.setattr(LlamaCppBaseline, "take", watched_take)
    monkeypatch.setattr(LlamaCppBaseline, "turns", watched_turns)
    shares: list[float] = []
    reports = list(run_throughput(replace(SMALL, llama_cpp=True), lambda share, what: shares.append(share)))
    assert [[rival.turns for rival in report.rivals] for report in reports] == [[], [], [1], [2]]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    (rival,) = reports[-1].rivals
    assert rival.identical_answers + rival.near_tie_answers + rival.other_answers == 10
    assert rival.other_answers == 10, "a sum is not what our model computes"
    assert not reports[-1].has_failed
    assert rival.lowest_output_tokens_per_s <= rival.output_tokens_per_s <= rival.highest_output_tokens_per_s
    per_output = 1 + reports[-1].prompt_tokens / reports[-1].output_tokens
    assert rival.total_tokens_per_s == pytest.approx(rival.output_tokens_per_s * per_output)
    for said in ("1234 (fake)", "10 sequences of up to 256 tokens", "weights and KV in float32"):
        assert said in rival.settings
    text = shown(reports[-1].section(), width=200)
    assert "0% same" in text
    assert "0 of 10 answers are the same as ours, 10 elsewhere." in text
    figure = Figure()
    reports[-1].section().plots[0].draw(figure)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["gpu-only", "llama.cpp"]
    metrics = {metric.name: metric.value for metric in reports[-1].metrics()}
    assert metrics["throughput.llama.cpp.output_tokens_per_s"] == rival.output_tokens_per_s


@pytest.mark.parametrize("weights_dtype", ["auto", "float32"])
def test_llama_cpp_reads_the_gguf_file_that_the_policies_have(
    weights_dtype: str, fake_server: list[Any], tmp_path: Path
) -> None:
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=16,
    )
    model = LlamaForCausalLM(config)
    path = write_quantised(tmp_path / "small.gguf", model, type_name="Q8_0", type_names={"ffn_up": "Q4_0"})
    before = path.read_bytes()
    options = replace(SMALL, shape=None, model=path, weights_dtype=weights_dtype, llama_cpp=True, repeats=1)
    report = last(run_throughput(options, ignore))
    (rival,) = report.rivals
    assert rival.identical_answers + rival.near_tie_answers + rival.other_answers == 10
    assert any(str(path) in process.args for process in fake_server)
    assert path.read_bytes() == before
    became = "kept as stored" if weights_dtype == "auto" else "dequantised to float32"
    assert f"weights those of small.gguf itself, in Q8_0 and Q4_0 (here {became}), KV in float32" in (
        rival.settings
    )


def test_with_too_little_memory_fewer_requests_run_at_once(
    fake_server: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_LLAMA_SERVER", "memory")
    report = last(run_throughput(replace(SMALL, llama_cpp=True, repeats=1), ignore))
    assert "7 sequences of up to 256 tokens" in report.rivals[0].settings  # three quarters of 10


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        ("load", "ended with code 3: cannot load"),
        ("crash at start", r"crashed \(SIGSEGV\).*-DGGML_NATIVE=OFF"),
        ("crash", r"crashed \(SIGILL\).*-DGGML_NATIVE=OFF"),
        ("refuse", "HTTP 500.*no room in KV"),
        ("die", "server failed.*out of GPU memory"),
    ],
)
def test_a_failure_of_llama_cpp_says_why_and_keeps_what_was_measured(
    failure: str, says: str, fake_server: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_LLAMA_SERVER", failure)
    reports = run_throughput(replace(SMALL, llama_cpp=True, repeats=1), ignore)
    assert next(reports).policies
    with pytest.raises(RuntimeError, match=says):
        next(reports)
    assert failure == "load" or len(fake_server) < 4, "one that crashes is not started again and again"


def test_ctrl_c_ends_the_server_and_what_it_is_at(
    fake_server: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_LLAMA_SERVER", "hang")

    def interrupted(futures: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llama_cpp, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        last(run_throughput(replace(SMALL, llama_cpp=True, repeats=1), ignore))


@needs_llama_server
@pytest.mark.parametrize("name", CONFIGS)
def test_llama_cpp_computes_the_same_model(name: str, tmp_path: Path) -> None:
    decoder = made(CONFIGS[name])
    prompts = torch.randint(0, 257, (3, 70), generator=torch.Generator().manual_seed(1)).tolist()
    baseline = LlamaCppBaseline()
    write_gguf(gguf, decoder, baseline._file)
    workload = Workload(tuple(WorkloadRequest(0.0, 70, 6) for _ in prompts), 0)
    job = llama_cpp._Job(workload, [], (), torch.float32, wants_gpu=False, kv_tokens=4096, num_threads=1)
    with baseline._served(job) as (url, num_sequences, _):
        assert num_sequences == 3
        answers = baseline._answers(url, prompts, [6] * 3, TOP_LOGPROBS, num_sequences, lambda share: None)
    baseline.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == 6
        tokens = torch.tensor(prompt + [token.token_id for token in answer])
        logprobs = logits_of_all(decoder, tokens).log_softmax(-1)
        for token, ours in zip(answer, logprobs[69:], strict=False):
            assert token.logprob is not None
            assert ours[token.token_id] >= ours.max() - 0.02  # its attention rounds to 16 bits
            assert token.logprob.logprob == pytest.approx(float(ours[token.token_id]), abs=0.02)


@needs_llama_server
def test_llama_cpp_answers_as_we_do() -> None:
    report = last(run_throughput(replace(SMALL, llama_cpp=True, repeats=1), ignore))
    (rival,) = report.rivals
    assert rival.other_answers == 0
    assert rival.identical_answers >= 9
