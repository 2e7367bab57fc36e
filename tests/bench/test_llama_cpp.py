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
from matplotlib.figure import Figure
from suites import ignore, last, shown
from torch import Tensor

from neo_desktop.app.bench.throughput import llama_cpp
from neo_desktop.app.bench.throughput.gguf_file import (
    check_expressible,
    check_installed,
    program,
    write_gguf,
)
from neo_desktop.app.bench.throughput.llama_cpp import LlamaCppBaseline
from neo_desktop.app.bench.throughput.suite import run_throughput
from neo_desktop.app.bench.throughput.workload import TOP_LOGPROBS, ThroughputOptions, Workload
from neo_desktop.engine.simulation.workload import WorkloadRequest
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.rope import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling
from neo_desktop.models.shapes import shape
from neo_desktop.models.weights import named_weights

gguf = pytest.importorskip("gguf")
needs_llama_server = pytest.mark.skipif(program() is None, reason="llama-server is not installed")
CPU = torch.device("cpu")
TINY = shape("tiny")
LLAMA3 = RopeConfig(500.0, Llama3Scaling(8.0, 1.0, 4.0, original_max_tokens=32))
QWEN2, QWEN3, MISTRAL = (f"{name}ForCausalLM" for name in ("Qwen2", "Qwen3", "Mistral"))
CONFIGS = {
    "llama": TINY,
    "llama-tied": replace(TINY, tie_word_embeddings=True),
    "llama-biases": replace(TINY, qkv_bias=True, output_bias=True, mlp_bias=True),
    "llama-wide-heads": replace(TINY, head_dim=32),
    "llama3-rope": replace(TINY, rope=LLAMA3),
    "linear-rope": replace(TINY, rope=RopeConfig(1e3, LinearScaling(3.0))),
    "mistral": replace(TINY, architecture=MISTRAL),
    "qwen2": replace(TINY, architecture=QWEN2, qkv_bias=True, rms_norm_eps=1e-6),
    "qwen2-linear-rope": replace(
        TINY, architecture=QWEN2, qkv_bias=True, rope=RopeConfig(1e3, LinearScaling(3.0))
    ),
    "qwen3": replace(TINY, architecture=QWEN3, qk_norm=True, head_dim=32),
}
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


def made(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    """A model in which every weight matters."""
    decoder = Decoder(config, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(1)
    for weight in named_weights(decoder):
        values = torch.randn(weight.shape, generator=generator) * 0.2
        weight.load(0, values + 1 if "norm" in weight.name else values)
    return decoder


def read(config: ModelConfig, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Decoder]:
    """Write a model and read the file back."""
    decoder = made(config, dtype)
    write_gguf(gguf, decoder, folder / "model.gguf")
    return gguf.GGUFReader(folder / "model.gguf"), decoder


def tensors_of(reader: Any) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in reader.tensors}


def values_of(tensor: Any) -> Tensor:
    """A tensor's values in 32 bits; the file's bytes are read without the library."""
    shape_of = tuple(int(size) for size in reversed(tensor.shape))
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[tensor.tensor_type.name]
    return torch.frombuffer(bytearray(tensor.data.tobytes()), dtype=dtype).reshape(shape_of).float()


def test_the_file_describes_the_model(tmp_path: Path) -> None:
    config = replace(CONFIGS["qwen3"], rope=RopeConfig(1e3, LinearScaling(3.0)))
    reader, _ = read(config, tmp_path)
    values = {name: field.contents() for name, field in reader.fields.items()}
    assert values["general.architecture"] == "qwen3"
    assert len(values["tokenizer.ggml.tokens"]) == 257
    expected = {
        "vocab_size": 257,
        "context_length": 4096,
        "embedding_length": 64,
        "feed_forward_length": 160,
        "block_count": 2,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "rope.dimension_count": 32,
        "rope.freq_base": 1e3,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 3.0,
    }
    assert {name: values[f"qwen3.{name}"] for name in expected} == expected
    assert values["qwen3.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_matrices_keep_their_dtype_and_everything_its_values(dtype: torch.dtype, tmp_path: Path) -> None:
    reader, decoder = read(CONFIGS["qwen2"], tmp_path, dtype)
    tensors = tensors_of(reader)
    layer = decoder.layers[1]
    qkv, gate_up, bias = layer.qkv.dense(), layer.gate_up.dense(), layer.qkv.bias
    assert bias is not None
    expected = {
        "token_embd.weight": decoder.embedding,
        "output.weight": decoder.lm_head.dense(),
        "output_norm.weight": decoder.final_norm,
        "blk.1.attn_norm.weight": layer.input_norm,
        "blk.1.ffn_norm.weight": layer.post_attention_norm,
        "blk.1.attn_q.weight": qkv[:64],
        "blk.1.attn_k.weight": qkv[64:96],
        "blk.1.attn_v.weight": qkv[96:],
        "blk.1.attn_q.bias": bias[:64],
        "blk.1.attn_k.bias": bias[64:96],
        "blk.1.attn_v.bias": bias[96:],
        "blk.1.attn_output.weight": layer.output.dense(),
        "blk.1.ffn_gate.weight": gate_up[:160],
        "blk.1.ffn_up.weight": gate_up[160:],
        "blk.1.ffn_down.weight": layer.down.dense(),
    }
    assert set(expected) == {name for name in tensors if not name.startswith("blk.0.")}
    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    for name, weight in expected.items():
        assert tensors[name].tensor_type.name == (names[dtype] if weight.ndim == 2 else "F32")
        torch.testing.assert_close(values_of(tensors[name]), weight.float(), rtol=0, atol=0)


def test_rows_of_q_and_k_are_ordered_for_the_rotation_of_neighbours(tmp_path: Path) -> None:
    reader, decoder = read(CONFIGS["llama-biases"], tmp_path)
    tensors = tensors_of(reader)
    layer = decoder.layers[0]
    qkv, bias = layer.qkv.dense(), layer.qkv.bias
    assert bias is not None
    for begin, num_heads, name in ((0, 4, "attn_q"), (64, 2, "attn_k")):
        for kind, ours in (("weight", qkv), ("bias", bias)):
            theirs = values_of(tensors[f"blk.0.{name}.{kind}"])
            for head in range(num_heads):
                for channel in range(8):  # turns with the one half a head further on
                    row = begin + 16 * head + channel
                    assert torch.equal(theirs[16 * head + 2 * channel], ours[row])
                    assert torch.equal(theirs[16 * head + 2 * channel + 1], ours[row + 8])
    assert torch.equal(values_of(tensors["blk.0.attn_v.weight"]), qkv[96:])


def test_tied_embeddings_are_written_once(tmp_path: Path) -> None:
    reader, _ = read(CONFIGS["llama-tied"], tmp_path)
    assert "output.weight" not in tensors_of(reader)


@pytest.mark.parametrize(
    "config",
    [
        replace(TINY, architecture="GptForCausalLM"),
        replace(TINY, layer_windows=(None, 16)),
        replace(CONFIGS["qwen2"], rope=LLAMA3),
        replace(TINY, rope=RopeConfig(1e4, YarnScaling(4.0, 32, 32.0, 1.0, True, 1.1))),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(config: ModelConfig) -> None:
    with pytest.raises(ValueError, match=r"llama\.cpp cannot be given this model"):
        check_expressible(config)


@pytest.fixture
def fake_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The fake in place of llama-server; whatever happens, it ends and no file is left."""
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
    yield temporary
    assert not list(temporary.iterdir()), "the file with the weights is left"
    assert all(process.poll() is not None for process in processes), "the server is left"


def test_a_full_disk_is_told_before_anything_is_measured(
    fake_server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(OSError, match=r"temporary file of 0\.0 GB, but .* TMPDIR"):
        last(run_throughput(replace(SMALL, llama_cpp=True), ignore))


def test_what_is_missing_is_told_with_what_to_install(
    fake_server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_installed()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs gguf: pip install 'neo-desktop\[llama"):
        check_installed()
    monkeypatch.setenv("LLAMA_SERVER", "/nowhere/llama-server")
    with pytest.raises(ValueError, match="llama-server on the PATH"):
        replace(SMALL, llama_cpp=True)


def test_llama_cpp_takes_its_turns_when_our_model_is_gone(
    fake_server: Path, monkeypatch: pytest.MonkeyPatch
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


def test_with_too_little_memory_fewer_requests_run_at_once(
    fake_server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_LLAMA_SERVER", "memory")
    report = last(run_throughput(replace(SMALL, llama_cpp=True, repeats=1), ignore))
    assert "7 sequences of up to 256 tokens" in report.rivals[0].settings  # three quarters of 10


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        ("load", "ended with code 3: cannot load"),
        ("refuse", "HTTP 500.*no room in KV"),
        ("die", "server failed.*out of GPU memory"),
    ],
)
def test_a_failure_of_llama_cpp_says_why_and_keeps_what_was_measured(
    failure: str, says: str, fake_server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_LLAMA_SERVER", failure)
    reports = run_throughput(replace(SMALL, llama_cpp=True, repeats=1), ignore)
    assert next(reports).policies
    with pytest.raises(RuntimeError, match=says):
        next(reports)


def test_ctrl_c_ends_the_server_and_what_it_is_at(fake_server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
