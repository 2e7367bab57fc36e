"""The kernels' own tests pass as Triton compiles the kernels for GPUs, and mutants of that code are noticed.

This is no test on a GPU. It executes PTX, which a driver would translate further, in one possible order.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf_files import write_gguf
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).resolve().parent
SUPPORT = FOLDER.parent / "support"
GPUS = (75, 86, 90, 120)
# name → arguments of pytest, and the kernels that it launches, at least.
GROUPS: dict[str, tuple[list[str], set[str]]] = {
    "attention": (["test_paged_decode.py", "test_device_layer.py"], {"_attend", "attend_plain", "_merge"}),
    "products": (
        ["test_quantised.py", "test_host_tiles.py"],
        {
            "_round",
            "_multiply_integers",
            "_multiply_matrices",
            "_multiply_plain",
            "_multiply_tiles",
            "_dequantise",
            "_unpack",
        },
    ),
    "types": (["test_quantised.py", "--all", "-k", "integers-2"], {"_round", "_multiply_integers"}),
    "types on tensor cores": (
        ["test_quantised.py", "--all", "-k", "integers-5"],
        {"_round", "_multiply_matrices"},
    ),
    "experts": (
        ["test_experts.py"],
        {"_choose", "_find_blocks", "_multiply_blocks", "_multiply_integers", "_gated", "_add_up"},
    ),
    "iterations": (
        ["../support/ptx/iterations.py"],
        {"_add_rms_norm", "_gated", "_rope_append", "_copy_rows"},
    ),
    "others": (
        ["test_elementwise.py", "test_rope_append.py", "test_row_copy.py", "test_recurrent.py"],
        {"_add_rms_norm", "_gated", "_rope_append", "_copy_rows", "_convolve"}
        | {"_scan", "_within_chunks", "_across_chunks"},
    ),
}
PYTEST = ["-m", "pytest", "-n", "0", "-q", "-p", "ptx.plugin", "-p", "no:cacheprovider", "--timeout=0"]


ROOT = FOLDER.parents[1]


def run(folder: Path, *arguments: str, program: Path = Path(sys.executable), **environment: str) -> str:
    """Run a program, usually Python, in its own process: Triton runs its interpreter in this one."""
    compiles = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": os.environ.get("PTX_CACHE") or str(folder)}
    result = subprocess.run(
        [program, *arguments],
        env=os.environ | compiles | {"PYTHONPATH": str(SUPPORT)} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-5_000:]
    return result.stdout


@pytest.mark.sample(0)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("capability", GPUS)
def test_compiled_kernels_pass_their_tests(group: str, capability: int, tmp_path: Path) -> None:
    chosen, kernels = GROUPS[group]
    arguments = [str(FOLDER / each) if each.endswith(".py") else each for each in chosen]
    output = run(tmp_path, *PYTEST, *arguments, PTX_CAPABILITY=str(capability))
    (line,) = (each for each in output.splitlines() if each.startswith("launches: "))
    launches = json.loads(line.removeprefix("launches: "))
    assert launches.keys() >= kernels - ({"_multiply_tiles"} if capability < 80 else set())


@pytest.mark.sample(0)
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    not (ROOT / "build/imitated-gpu/installed").exists(),
    reason="needs the imitated GPU: run scripts/imitated_gpu.sh once, which downloads torch for CUDA",
)
@pytest.mark.parametrize("capability", [75, 86])
def test_engines_give_the_cpus_tokens(capability: int, tmp_path: Path) -> None:
    """On the imitated GPU's streams and graphs, with KV on the device and with some in host memory."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    output = run(
        tmp_path,
        *("--run", "-m", "ptx.engine"),
        *(str(write_gguf(tmp_path / f"{name}.gguf", model, type_name=name)) for name in ("F16", "Q4_0")),
        program=ROOT / "scripts/imitated_gpu.sh",
        IMITATED_GPU_CAPABILITY=str(capability),
    )
    launches = [json.loads(line).keys() for line in output.splitlines()]
    attention = "attend_plain" if capability < 80 else "_attend"
    assert all(each >= {"_add_rms_norm", "_gated", "_rope_append", attention} for each in launches)
    assert [each >= {"_round", "_multiply_integers", "_multiply_matrices"} for each in launches] == [
        False,
        False,
        True,
        True,
    ]


def mutants(folder: Path, capability: int, case: str) -> list[dict[str, str | None]]:
    output = run(folder, "-m", "ptx.mutants", str(capability), case)
    unchanged, *others = (json.loads(line) for line in output.splitlines())
    assert unchanged["noticed"] is None, unchanged
    return others


@pytest.mark.sample(0)
def test_mutants_of_the_norm_are_noticed(tmp_path: Path) -> None:
    found = mutants(tmp_path, 86, "norm")
    assert [each["instruction"] for each in found].count("bar.sync 0") >= 2
    assert [each for each in found if each["noticed"] is None] == []


@pytest.mark.sample(0)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", ["attention", "tiles"])
def test_most_mutants_are_noticed(case: str, tmp_path: Path) -> None:
    """Some change no result: softmax may subtract any head's maximum, and some barriers order nothing."""
    found = mutants(tmp_path, 86, case)
    waits = [each for each in found if "wait_group" in str(each["instruction"])]
    assert len(waits) >= 2
    unnoticed = [each for each in found if each["noticed"] is None]
    assert len(unnoticed) <= len(found) // 10, unnoticed
