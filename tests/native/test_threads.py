"""The thread pool: many callers, forked children, and idle threads that sleep."""

import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from paged_case import PagedCase, make_case

from neo_desktop import native


def test_calls_at_the_same_time_get_their_own_answers() -> None:
    cases = [
        make_case([900 - 100 * n, 30 * n + 1], group=n + 1, head_dim=64 + 16 * n, seed=n) for n in range(6)
    ]
    expected = [case.run(num_threads=1) for case in cases]
    with ThreadPoolExecutor(len(cases)) as callers:
        for _ in range(20):
            outputs = callers.map(lambda case: case.run(num_threads=4), cases)
            assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def run_in_child(case: PagedCase, expected: torch.Tensor) -> None:
    os._exit(0 if torch.equal(case.run(num_threads=3), expected) else 1)


def test_a_forked_child_makes_its_own_pool() -> None:
    case = make_case([2000, 700])
    expected = case.run(num_threads=3)  # the parent's pool has workers now; the child's has none
    child = multiprocessing.get_context("fork").Process(target=run_in_child, args=(case, expected))
    child.start()
    child.join(timeout=30)
    assert child.exitcode == 0
    assert torch.equal(case.run(num_threads=3), expected)


def test_idle_threads_sleep() -> None:
    make_case([2000, 700]).run(num_threads=4)
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.2  # three spinning workers would use 0.4 s or more


def num_threads_with(mask: set[int]) -> tuple[int, int]:
    """Return the thread counts, by default and beside a GPU, of a process limited to these CPUs."""
    code = (
        f"import os; os.sched_setaffinity(0, {mask}); "
        "from neo_desktop.native import *; print(default_num_threads(), num_threads_beside_gpu())"
    )
    child = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    default, beside_gpu = child.stdout.split()
    return int(default), int(beside_gpu)


def test_thread_counts_follow_the_affinity_mask() -> None:
    cpus = os.sched_getaffinity(0)
    default, beside_gpu = num_threads_with(cpus)
    assert 1 <= default <= len(cpus)
    assert 1 <= beside_gpu <= max(default - 2, 1)
    assert num_threads_with({min(cpus)}) == (1, 1)


MASKS_OF_THREADS = """
import os, sys, threading
import torch
from neo_desktop import native
before = {int(task) for task in os.listdir("/proc/self/task")}
assert native.bind_threads({bind}) == {bind}
native.read_seconds(torch.zeros(1 << 24, dtype=torch.uint8), 2)
workers = {int(task) for task in os.listdir("/proc/self/task")} - before
print(*sorted(len(os.sched_getaffinity(worker)) for worker in workers))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs, to tell one from all")
def test_workers_are_bound_to_a_cpu_each_or_free() -> None:
    for bind, num_cpus in ((True, 1), (False, len(os.sched_getaffinity(0)))):
        code = MASKS_OF_THREADS.replace("{bind}", str(bind))
        found = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
        ).stdout
        assert set(found.split()) == {str(num_cpus)}


def test_answers_do_not_depend_on_where_threads_run() -> None:
    case = make_case([900, 30])
    expected = case.run(num_threads=1)
    try:
        for bind in (False, True):
            native.bind_threads(bind)
            assert torch.equal(case.run(num_threads=3), expected)
    finally:
        native.bind_threads(True)


def test_the_default_thread_count_can_be_set() -> None:
    usual = native.default_num_threads()
    try:
        native.set_default_num_threads(3)
        assert native.default_num_threads() == 3
        assert native.num_usable_cpus() == usual
        with pytest.raises(ValueError, match="num_threads is -1"):
            native.set_default_num_threads(-1)
    finally:
        native.set_default_num_threads(0)
    assert native.default_num_threads() == usual


def test_environment_forces_an_isa(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([300], group=4)
    monkeypatch.setenv("NEO_DESKTOP_ISA", "scalar")
    assert native.default_isa() == "scalar"
    assert torch.equal(case.run(), case.run(isa="scalar"))
    monkeypatch.setenv("NEO_DESKTOP_ISA", "mmx")
    with pytest.raises(ValueError, match="isa 'mmx' is unknown"):
        case.run()


def test_huge_pages_are_asked_for_once_the_tensor_holds_a_page() -> None:
    assert not native.advise_huge_pages(torch.empty(8))
    with pytest.raises(ValueError, match="contiguous"):
        native.advise_huge_pages(torch.empty(4, 4).mT)
