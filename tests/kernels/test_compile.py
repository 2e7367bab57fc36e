"""Every kernel compiles for every supported GPU, fits into it and spills no registers."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import triton

from benchmarks.gpu_budget import counts, exceeded
from benchmarks.sass_budget import (
    TRITON_OF_TORCH,
    compile_all,
    read_budget,
    run,
    table,
    worse,
)
from neo_desktop.engine.kernels.occupancy import USUAL_PROGRAMS

KIB = 1024
# Compilation takes under a minute on two idle cores, and many minutes on busy ones.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.sample(0)]

# Maximum bytes per program, by compute capability.
SHARED_MEMORY = {75: 64 * KIB, 80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 120: 99 * KIB}


INSTALLED = "installed"


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    return compile_all()


@pytest.fixture(params=[INSTALLED, *TRITON_OF_TORCH.values()])
def kernels(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Kernels for every GPU: compiled by the installed Triton, or recorded for the Tritons of users."""
    if request.param == INSTALLED:
        found: list[dict[str, Any]] = request.getfixturevalue("compiled")
        return found
    kernels = []
    for name, figures in read_budget()[request.param].items():
        parts = re.fullmatch(r"(.*): (\w+) on sm_(\d+)", name)
        assert parts is not None
        variant, kernel, capability = parts.groups()
        kernels.append({"variant": variant, "kernel": kernel, "capability": int(capability), **figures})
    return kernels


def test_every_kernel_was_compiled_for_every_gpu(kernels: list[dict[str, Any]]) -> None:
    compiled = {(kernel["kernel"], kernel["capability"]) for kernel in kernels}
    names = ("_attend", "_merge", "_rope_append", "_add_rms_norm", "_gated", "_copy_rows")
    names += (
        "_round",
        "_multiply_integers",
        "_multiply_matrices",
        "_multiply_plain",
        "_dequantise",
        "_unpack",
        "_choose",
        "_find_blocks",
        "_multiply_blocks",
        "_add_up",
        "_scan",
        "_within_chunks",
        "_across_chunks",
        "_convolve",
    )
    everywhere = {(name, capability) for name in names for capability in SHARED_MEMORY}
    by_tensor_cores = {("_multiply_tiles", capability) for capability in SHARED_MEMORY if capability >= 80}
    assert compiled == everywhere | by_tensor_cores | {("attend_plain", 75)}


def test_no_kernel_spills_registers(kernels: list[dict[str, Any]]) -> None:
    assert [kernel for kernel in kernels if kernel["spilled"]] == []


def test_programs_fit_into_shared_memory(kernels: list[dict[str, Any]]) -> None:
    assert [kernel for kernel in kernels if kernel["shared"] > SHARED_MEMORY[kernel["capability"]]] == []


def test_memory_is_read_16_bytes_at_a_time(kernels: list[dict[str, Any]]) -> None:
    """Decode attention has more wide loads than its queries need: K and V use them."""
    for kernel in kernels:
        if kernel["kernel"] in ("_choose", "_find_blocks", "_convolve"):  # these read few numbers
            continue
        assert kernel["wide_loads"] >= (4 if "attend" in kernel["kernel"] else 1), kernel


def test_without_tensor_cores_four_programs_fit_into_a_multiprocessor(
    kernels: list[dict[str, Any]],
) -> None:
    """On capability 7.5, with up to 8 query heads per KV head."""
    plain = [kernel for kernel in kernels if kernel["kernel"] == "attend_plain"]
    assert {kernel["variant"] for kernel in plain} == {
        kernel["variant"]
        for kernel in kernels
        if kernel["capability"] == 75
        and (group := re.match(r"decode \w+, group (\d+)", kernel["variant"]))
        and int(group[1]) <= 8
    }
    assert all(kernel["registers"] <= 128 for kernel in plain)


@pytest.mark.parametrize("version", TRITON_OF_TORCH.values())
def test_instructions_leave_memory_the_limit_of_products_with_quantised_weights(version: str) -> None:
    """At full bandwidth, few rows take a share of a card's instructions; see benchmarks/gpu_budget.py."""
    assert len(list(counts(version))) > 20
    assert exceeded(version) == []


def test_two_tiles_of_k_and_v_are_under_way(kernels: list[dict[str, Any]]) -> None:
    """From capability 8.0 on, the kernel's shared memory shows that the compiler lets loads run ahead."""
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


def test_no_figure_of_the_machine_code_has_become_worse(compiled: list[dict[str, Any]]) -> None:
    """Compare the installed Triton's code with its budget; benchmarks/sass_budget.py documents changes.

    A Triton version without a budget may compile differently. For it, programs per multiprocessor may drop by
    one at most; the tests above check the hard limits (no spills, shared memory).
    """
    budget, found = read_budget(), table(compiled)
    if triton.__version__ in budget:
        assert worse(budget[triton.__version__], found) == []
        return
    newest = budget[max(TRITON_OF_TORCH.values())]
    assert found.keys() == newest.keys()
    for name, figures in found.items():
        assert figures["programs_per_sm"] >= newest[name]["programs_per_sm"] - 1, name


def test_the_budget_is_of_what_users_have() -> None:
    """The budget covers the Triton of every supported torch; tests run with the newest torch's."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (torch_range,) = [each for each in project["dependencies"] if each.startswith("torch>")]
    first, end = (int(part) for part in re.findall(r"2\.(\d+)", torch_range))
    assert list(TRITON_OF_TORCH) == [f"2.{minor}" for minor in range(first, end)]
    budget = read_budget()
    assert set(budget) == set(TRITON_OF_TORCH.values())
    assert len({frozenset(kernels) for kernels in budget.values()}) == 1
    (pinned,) = [each for each in project["optional-dependencies"]["dev"] if each.startswith("triton")]
    newest = max(TRITON_OF_TORCH.values())
    assert pinned.startswith(f"triton=={newest.rpartition('.')[0]}.*")


def test_what_is_reckoned_with_when_nothing_is_known_fits(kernels: list[dict[str, Any]]) -> None:
    for capability, programs in USUAL_PROGRAMS.items():
        (kernel,) = [
            kernel
            for kernel in kernels
            if kernel["variant"] == "decode fp16, group 4, head_dim 128"
            and kernel["capability"] == capability
            and kernel["kernel"] in ("_attend", "attend_plain")
        ]
        assert programs <= kernel["programs_per_sm"]


def test_no_iteration_waits_for_the_compiler() -> None:
    """A pool compiles all variants at start: any batch size and table width, windows, unaligned addresses."""
    at_start, later = run("late_variants.py").split()
    assert int(at_start) > 4
    assert int(later) == 0
