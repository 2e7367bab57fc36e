"""Every kernel compiles for every GPU that is supported, fits into it and spills no registers."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
KIB = 1024
SHARED_MEMORY = {75: 64 * KIB, 80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB}  # most for a program


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the compiler made for every GPU."""
    parts = range(2)
    folders = [tmp_path_factory.mktemp("triton") for _ in parts]
    with ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(run, "compile_kernels.py", folders[part], str(part), str(len(parts)))
            for part in parts
        ]
    return [json.loads(line) for job in jobs for line in job.result().splitlines()]


def run(program: str, folder: Path, *arguments: str) -> str:
    """Run a program that compiles, in a process of its own: in this one Triton may be in its interpreter."""
    result = subprocess.run(
        [sys.executable, SUPPORT / program, *arguments],
        # An empty folder, since what an earlier run compiled would be found again.
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-10_000:]
    return result.stdout


def test_every_kernel_was_compiled_for_every_gpu(kernels: list[dict[str, Any]]) -> None:
    compiled = {(kernel["kernel"], kernel["capability"]) for kernel in kernels}
    names = ("_attend", "_merge", "_rope_append", "_add_rms_norm", "_silu_mul", "_copy_rows")
    everywhere = {(name, capability) for name in names for capability in SHARED_MEMORY}
    assert compiled == everywhere | {("attend_plain", 75)}


def test_no_kernel_spills_registers(kernels: list[dict[str, Any]]) -> None:
    assert [kernel for kernel in kernels if kernel["spilled"]] == []


def test_programs_fit_into_shared_memory(kernels: list[dict[str, Any]]) -> None:
    assert [kernel for kernel in kernels if kernel["shared"] > SHARED_MEMORY[kernel["capability"]]] == []


def test_memory_is_read_16_bytes_at_a_time(kernels: list[dict[str, Any]]) -> None:
    """More such loads in decode attention than queries need: those of K and V."""
    for kernel in kernels:
        assert kernel["wide_loads"] >= (4 if "attend" in kernel["kernel"] else 1), kernel


def test_without_tensor_cores_four_programs_fit_into_a_multiprocessor(
    kernels: list[dict[str, Any]],
) -> None:
    """On 7.5, for up to 8 query heads per KV head."""
    plain = [kernel for kernel in kernels if kernel["kernel"] == "attend_plain"]
    assert {kernel["variant"] for kernel in plain} == {
        kernel["variant"]
        for kernel in kernels
        if kernel["capability"] == 75
        and kernel["variant"].startswith("decode")
        and "group 16" not in kernel["variant"]
    }
    assert all(kernel["registers"] <= 128 for kernel in plain)


def test_two_tiles_of_k_and_v_are_under_way(kernels: list[dict[str, Any]]) -> None:
    """From 8.0 on. Whether the compiler lets loads run ahead shows in the shared memory it sets aside."""
    tile = 2 * 32 * 128 * 2  # K and V, tokens, head_dim, bytes
    decodes = [
        kernel
        for kernel in kernels
        if kernel["kernel"] == "_attend"
        and kernel["capability"] >= 80
        and "head_dim 128" in kernel["variant"]
    ]
    assert decodes
    assert all(kernel["shared"] >= 2 * tile for kernel in decodes)


def test_no_iteration_waits_for_the_compiler(tmp_path: Path) -> None:
    """Batches of any size, tables of any width, windows and odd addresses use what making a pool compiled."""
    at_start, later = run("late_variants.py", tmp_path).split()
    assert int(at_start) > 4
    assert int(later) == 0
