"""The relay: attention layer by layer, controlled by flags in memory alone, as by a GPU's stream."""

import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paged_case import make_case
from relay_case import NUM_LAYERS, batch_of, caches_of, offload, relay

from neo_desktop.native.relay import HostCaches, LayerCache, RelayStalledError


def test_each_layer_is_attended_to_with_its_window() -> None:
    case, windows = make_case([700, 90, 33], group=4), (0, 50, 0)
    attends, batch = relay(), batch_of(case)
    task = batch.task(caches_of(case, windows))
    for _ in range(2):  # flags and buffers are used again
        attends.start([task])
        for layer, window in enumerate(windows):
            expected = replace(case, window=window).run()
            assert torch.equal(offload(batch, layer), expected)
        assert [(step.turn, step.task) for step in attends.finish()] == [(0, 0), (1, 0), (2, 0)]


def test_sub_batches_take_turns_within_a_layer() -> None:
    case = make_case([400, 120, 77], group=2)
    batches = [batch_of(case), batch_of(case)]
    attends = relay()
    attends.start([batch.task(caches_of(case)) for batch in batches])
    for layer in range(NUM_LAYERS):
        for batch in batches:
            assert torch.equal(offload(batch, layer), case.run())
    steps = attends.finish()
    assert [(step.turn, step.task) for step in steps] == [(i, b) for i in range(NUM_LAYERS) for b in (0, 1)]
    times = [time_ns for step in steps for time_ns in (step.start_ns, step.end_ns)]
    assert times == sorted(times)
    assert times[-1] <= time.perf_counter_ns()


def test_decodes_by_layer_are_attended_to_where_they_stand() -> None:
    """Every layer has other requests, in partly empty slots, behind a sub-batch of ordinary decodes."""
    case = make_case([400, 120, 77, 33], group=2)
    ordinary, of_layer = batch_of(case), batch_of(case)
    present = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 1]], dtype=torch.int32)
    everything = {
        name: torch.stack([getattr(of_layer, name)] * NUM_LAYERS)
        for name in ("q", "k", "v", "out", "block_tables", "context_lens")
    }
    async_decodes = replace(of_layer, **everything)
    async_decodes.context_lens.mul_(present)
    async_decodes.q.mul_(torch.tensor([1.0, 2.0, 3.0]).view(-1, 1, 1, 1))
    attends, caches = relay(), caches_of(case)
    attends.start([ordinary.task(caches), async_decodes.task(caches)])
    for layer in range(NUM_LAYERS):
        assert torch.equal(offload(ordinary, layer), case.run())
        out = offload(async_decodes, layer)[layer]
        expected = replace(case, q=case.q * (layer + 1)).run()
        is_there = present[layer].bool()
        assert torch.equal(out[is_there], expected[is_there])
        assert bool(out[~is_there].isnan().all())
    assert [(step.turn, step.task) for step in attends.finish()] == [(i, b) for i in range(3) for b in (0, 1)]


def test_a_cancelled_iteration_lets_nobody_wait_and_the_next_one_is_right() -> None:
    case = make_case([400, 120])
    batch, attends = batch_of(case), relay()
    task = batch.task(caches_of(case))
    attends.start([task])
    offload(batch, 0)
    waiting = threading.Thread(target=lambda: [offload(batch, layer) for layer in (1, 2)])
    attends.cancel()
    waiting.start()
    with pytest.raises(RuntimeError, match="the iteration was cancelled"):
        attends.finish()
    waiting.join(timeout=60)
    assert not waiting.is_alive()
    attends.start([task])
    assert all(torch.equal(offload(batch, layer), case.run()) for layer in range(NUM_LAYERS))
    attends.finish()


def test_what_is_wrong_is_refused_before_anything_begins() -> None:
    case = make_case([400, 120])
    batch, caches, attends = batch_of(case), caches_of(case), relay()
    with pytest.raises(ValueError, match=r"context_lens\[0\] is 9999, beyond the"):
        replace(batch, context_lens=torch.full_like(batch.context_lens, 9999)).task(caches)
    with pytest.raises(ValueError, match="flags has shape"):
        replace(batch, flags=torch.zeros(2, 9, 16, dtype=torch.int32)).task(caches)
    attends.start([batch.task(caches)])
    with pytest.raises(RuntimeError, match="the relay's last iteration has not ended"):
        attends.start([batch.task(caches)])
    attends.cancel()
    with pytest.raises(ValueError, match="caches of all layers must be alike"):
        HostCaches(
            [
                LayerCache(case.k_cache, case.v_cache, None, None, 0),
                LayerCache(case.k_cache[1:], case.v_cache[1:], None, None, 0),
            ]
        )


def test_a_task_whose_block_tables_changed_is_checked_again() -> None:
    case = make_case([5, 700])
    batch = batch_of(case)
    task = batch.task(caches_of(case))
    task.check()
    batch.block_tables[1, 0] = 10**6
    with pytest.raises(ValueError, match="block"):
        task.check()


def test_a_thread_runs_the_steps_of_the_same_task() -> None:
    case, windows = make_case([700, 90, 33], group=4), (0, 50, 0)
    batch = batch_of(case)
    task = batch.task(caches_of(case, windows))
    for layer, window in enumerate(windows):
        task.run(layer)
        assert torch.equal(batch.out, replace(case, window=window).run())


def test_the_relay_sleeps_between_iterations() -> None:
    case = make_case([2000, 700])
    attends, batch = relay(), batch_of(case)
    attends.start([batch.task(caches_of(case))])
    for layer in range(NUM_LAYERS):
        offload(batch, layer)
    attends.finish()
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.2  # a polling thread would use 0.4 s


def test_a_gpu_that_stops_is_given_up_and_where_it_stood_is_told() -> None:
    case = make_case([400, 120])
    attends, batches = relay(), [batch_of(case), replace(batch_of(case), index=7)]
    tasks = [batch.task(caches_of(case)) for batch in batches]
    attends.start(tasks, timeout_s=1.0)
    offload(batches[0], 0)
    with pytest.raises(
        RelayStalledError, match=r"GPU did not hand over .* layer 0 of sub-batch 7 within 1.0 s"
    ):
        attends.finish()
    for batch in batches:  # later waits are released as well
        assert bool((batch.flags[1, :, 0] == 1).all())
    attends.start(tasks, timeout_s=60)
    for layer in range(NUM_LAYERS):
        for batch in batches:
            assert torch.equal(offload(batch, layer), case.run())
    attends.finish()


def test_the_timeout_begins_anew_with_every_step() -> None:
    case = make_case([40])
    attends, batch = relay(), batch_of(case)
    attends.start([batch.task(caches_of(case))], timeout_s=3.0)
    for layer in range(NUM_LAYERS):
        time.sleep(1.2)  # together more than the timeout
        offload(batch, layer)
    assert len(attends.finish()) == NUM_LAYERS


# Steps that never end: their page is unreadable, and the signal handler makes the thread sleep.
STUCK = """
import ctypes, mmap, signal, sys
sys.path.append(SUPPORT)
import torch
from dataclasses import replace
from paged_case import make_case
from relay_case import batch_of, caches_of, relay
from neo_desktop.native.relay import RelayStalledError

libc = ctypes.CDLL(None)
libc.signal.restype = ctypes.c_void_p
libc.signal(signal.SIGSEGV, ctypes.cast(libc.pause, ctypes.c_void_p))
case = make_case([400, 120])
caches, batches = caches_of(case), [batch_of(case) for _ in range(3)]
pages = mmap.mmap(-1, 1 << 20)
q = torch.frombuffer(pages, dtype=case.q.dtype)[: case.q.numel()].view(case.q.shape)
q.copy_(case.q)
_, kv_heads, _, head_dim = case.v_cache.shape
rows = torch.frombuffer(pages, dtype=q.dtype)[: 8 * kv_heads * head_dim].view(2, 4, kv_heads, head_dim)
attention, forgotten = (replace(batch, q=q).task(caches) for batch in batches[1:])
of_rows = torch.arange(4), (rows, rows), batches[0].flags
transfer = caches.rows_task("a prompt's KV", *of_rows, to_host=True)
assert libc.mprotect(ctypes.c_void_p(q.data_ptr()), ctypes.c_size_t(1 << 20), 0) == 0
for batch, task, timeout_s in zip(batches, (transfer, attention, forgotten), (0.5, 0.5, 0.0), strict=True):
    stuck = relay()
    stuck.start([task], timeout_s=timeout_s)
    batch.flags[0, 0, 0] = 1
    if not timeout_s:
        break
    try:
        stuck.finish()
    except RelayStalledError as error:
        print(error)
    assert bool((batch.flags[1, :, 0] == 1).all())
    try:
        stuck.start([batch.task(caches)])
    except RuntimeError as error:
        print(error)
print("end")
"""


def test_steps_that_never_end_are_given_up_and_do_not_keep_the_program_from_ending() -> None:
    """The program forgets to close its last relay, whose step never ends either."""
    program = STUCK.replace("SUPPORT", repr(str(Path(__file__).parents[1] / "support")))
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [
        "the CPU did not end storing a prompt's KV of layer 0 within 0.5 s",
        "the relay's last iteration has not ended",
        "the CPU did not end its attention for layer 0 of sub-batch 0 within 0.5 s",
        "the relay's last iteration has not ended",
        "end",
    ]


def test_a_relay_that_is_closed_takes_no_more() -> None:
    case = make_case([400, 120])
    attends, task = relay(), batch_of(case).task(caches_of(case))
    attends.start([task], timeout_s=60)
    attends.close()
    with pytest.raises(RuntimeError, match="the iteration was cancelled"):
        attends.finish()
    with pytest.raises(RuntimeError, match="the relay is closed"):
        attends.start([task])
    attends.close()  # again


def test_time_in_which_the_program_was_stopped_does_not_count() -> None:
    """After a suspension of the computer, the GPU had no time to answer either."""
    program = f"""
import sys; sys.path.append({str(Path(__file__).parents[1] / "support")!r})
from paged_case import make_case
from relay_case import NUM_LAYERS, batch_of, caches_of, offload, relay
case = make_case([40])
batch = batch_of(case)
relay, caches = relay(), caches_of(case)
relay.start([batch.task(caches)], timeout_s=3)
offload(batch, 0)
print("stop me", flush=True)
input()
for layer in range(1, NUM_LAYERS):
    offload(batch, layer)
print(len(relay.finish()))
"""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "stop me\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(3.5)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.5)  # a guard that only reads the clock would give up now
        said, _ = process.communicate("\n", timeout=60)
    assert said == f"{NUM_LAYERS}\n"
