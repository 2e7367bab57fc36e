"""The relay's transfers: rows of KV cross layer by layer, controlled by flags in memory alone."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged_case import make_case
from relay_case import batch_of, caches_of, offload
from torch import Tensor

from neo_desktop.native import empty_paired_keys, paged_kv_read, paged_kv_write
from neo_desktop.native.relay import (
    DONE,
    READY,
    HostCaches,
    HostTask,
    LayerCache,
    Relay,
    RelayStalledError,
    empty_flags,
)

PAGES, KV_HEADS, PAGE_TOKENS, HEAD_DIM = 3, 2, 16, 16
NUM_SLOTS = PAGES * PAGE_TOKENS


def make_layer(dtype: torch.dtype, *, in_pairs: bool) -> LayerCache:
    """Return a layer's cache, all zeros."""
    shape = (PAGES, KV_HEADS, PAGE_TOKENS, HEAD_DIM)
    k = torch.zeros(shape, dtype=dtype)
    if in_pairs:
        k = empty_paired_keys(
            PAGES, kv_heads=KV_HEADS, page_tokens=PAGE_TOKENS, head_dim=HEAD_DIM, dtype=dtype
        ).zero_()
    scales = [torch.zeros(shape[:3]) if dtype is torch.int8 else None for _ in range(2)]
    return LayerCache(k, torch.zeros(shape, dtype=dtype), scales[0], scales[1], 0)


def write(layer: LayerCache, rows: Tensor, slots: Tensor) -> None:
    k, v = rows
    paged_kv_write(k, v, layer.k_cache, layer.v_cache, slots, k_scale=layer.k_scale, v_scale=layer.v_scale)


def read(layer: LayerCache, slots: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(2, len(slots), KV_HEADS, HEAD_DIM, dtype=dtype)
    paged_kv_read(layer.k_cache, layer.v_cache, slots, *out, k_scale=layer.k_scale, v_scale=layer.v_scale)
    return out


@dataclass(frozen=True)
class Transfer:
    """The arguments of a transfer."""

    to_host: bool
    is_behind: bool
    slots: Tensor
    buffers: Tensor
    flags: Tensor

    def task(self, caches: HostCaches) -> HostTask:
        flow = {"to_host": self.to_host, "is_behind": self.is_behind}
        return caches.rows_task("a prompt's KV", self.slots, self.buffers.unbind(), self.flags, **flow)


def make_transfer(
    num_layers: int,
    slots: Tensor,
    *,
    to_host: bool,
    is_behind: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Transfer:
    buffers = torch.full((2, 2, len(slots), KV_HEADS, HEAD_DIM), torch.nan, dtype=dtype)
    flags = empty_flags(num_layers, pinned=False)
    return Transfer(to_host, is_behind, slots, buffers, flags)


class Device:
    """Thread that plays the GPU in one transfer: it fills or reads buffers, raises flags, waits for flags.

    Args:
        rows: to the host: [num_layers, 2, n, kv_heads, head_dim].
        pause: called before each flag is raised.
    """

    def __init__(self, transfer: Transfer, rows: Tensor, pause: Callable[[], None]) -> None:
        self.taken: list[Tensor] = []  # rows by layer, if to the device
        self.touched_early = False  # a buffer was overwritten before the device had read it
        self._transfer = transfer
        self._rows = rows
        self._pause = pause
        self._thread = threading.Thread(target=self._send if transfer.to_host else self._take)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()

    def _send(self) -> None:
        num_layers = len(self._rows)
        for layer, rows in enumerate(self._rows):
            if layer >= 2:
                self._wait(layer - 2)
            self._transfer.buffers[layer % 2].copy_(rows)
            self._raise(layer)
        for layer in range(num_layers):
            self._wait(layer)

    def _take(self) -> None:
        for layer in range(len(self._rows)):
            self._wait(layer)
            buffer = self._transfer.buffers[layer % 2]
            self.taken.append(buffer.clone())
            buffer.fill_(torch.nan)
            self._pause()
            self.touched_early |= not bool(buffer.isnan().all())
            if layer + 2 < len(self._rows):
                self._raise(layer + 2)

    def _raise(self, layer: int) -> None:
        self._pause()
        self._transfer.flags[READY, layer, 0] = 1

    def _wait(self, layer: int) -> None:
        while self._transfer.flags[DONE, layer, 0].item() == 0:
            time.sleep(0)


def expected_steps(num_layers: int, transfers: Sequence[Transfer]) -> list[tuple[int, int]]:
    """Return (layer, item) in the promised order."""

    def of(layer: int, *, behind: bool) -> Iterator[tuple[int, int]]:
        if 0 <= layer < num_layers:
            yield from ((layer, i) for i, item in enumerate(transfers) if item.is_behind is behind)

    return [
        step
        for turn in range(num_layers + 1)
        for step in (*of(turn, behind=False), *of(turn - 1, behind=True))
    ]


def _pause(turns: Iterator[float]) -> None:
    time.sleep(next(turns))


@st.composite
def iterations(draw: st.DrawFn) -> tuple[list[tuple[bool, bool, int]], list[float]]:
    """Draw transfers (to host, behind, rows), and the devices' pauses in seconds, in turn."""
    transfer = st.tuples(st.booleans(), st.booleans(), st.integers(0, 12))
    pause = st.sampled_from([0.0, 0.0, 0.0, 1e-4, 1e-3])
    return draw(st.lists(transfer, min_size=1, max_size=4)), draw(st.lists(pause, min_size=1, max_size=8))


@given(
    num_layers=st.integers(1, 5),
    plans=st.lists(iterations(), min_size=1, max_size=2),
    cache=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    in_pairs=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_rows_of_every_layer_go_where_they_belong_in_the_order_that_is_promised(
    num_layers: int,
    plans: Sequence[tuple[list[tuple[bool, bool, int]], list[float]]],
    cache: torch.dtype,
    dtype: torch.dtype,
    in_pairs: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    in_pairs |= cache is torch.int8
    layers, expected = ([make_layer(cache, in_pairs=in_pairs) for _ in range(num_layers)] for _ in range(2))
    for layer, same in zip(layers, expected, strict=True):
        rows = torch.randn(2, NUM_SLOTS, KV_HEADS, HEAD_DIM, generator=generator)
        write(layer, rows, torch.arange(NUM_SLOTS))
        write(same, rows, torch.arange(NUM_SLOTS))
    relay, caches = Relay(num_threads=2), HostCaches(layers)
    for items, pauses in plans:
        slots = torch.randperm(NUM_SLOTS, generator=generator)  # items share no slots
        transfers, devices = [], []
        for to_host, is_behind, count in items:
            transfers.append(
                make_transfer(num_layers, slots[:count], to_host=to_host, is_behind=is_behind, dtype=dtype)
            )
            slots = slots[count:]
        relay.start([item.task(caches) for item in transfers], timeout_s=60)
        turns = cycle(pauses)
        for item in transfers:
            shape = (num_layers, 2, len(item.slots), KV_HEADS, HEAD_DIM)
            rows = torch.randn(shape, generator=generator).to(dtype)
            devices.append(Device(item, rows, partial(_pause, turns)))
            if item.to_host:
                for layer, new in zip(expected, rows, strict=True):
                    write(layer, new, item.slots)
        for device in devices:
            device.join()
        steps = relay.finish()
        assert [(step.turn, step.task) for step in steps] == expected_steps(num_layers, transfers)
        times = [time_ns for step in steps for time_ns in (step.start_ns, step.end_ns)]
        assert times == sorted(times)
        for item, device in zip(transfers, devices, strict=True):
            assert not device.touched_early
            if not item.to_host:
                right = [read(layer, item.slots, dtype) for layer in expected]
                assert all(torch.equal(a, b) for a, b in zip(device.taken, right, strict=True))
        everything = torch.arange(NUM_SLOTS)
        for layer, same in zip(layers, expected, strict=True):
            assert torch.equal(read(layer, everything, dtype), read(same, everything, dtype))


NUM_LAYERS = 4
SLOTS = torch.arange(5)


def make_layers() -> list[LayerCache]:
    return [make_layer(torch.float32, in_pairs=True) for _ in range(NUM_LAYERS)]


def random_rows() -> Tensor:
    return torch.randn(NUM_LAYERS, 2, len(SLOTS), KV_HEADS, HEAD_DIM)


def test_attention_and_transfers_of_one_relay_take_turns() -> None:
    case = make_case([400, 120], group=2)
    relay, caches, batch = Relay(num_threads=2), caches_of(case), batch_of(case)
    rows = torch.full((2, 1, case.k_cache.shape[1], case.k_cache.shape[3]), torch.nan)
    slot = case.slots(0, torch.tensor([0]))
    flags = empty_flags(3, pinned=False)
    fetched = caches.rows_task("earlier KV", slot, (rows, rows.clone()), flags, to_host=False, is_behind=True)
    relay.start([fetched, batch.task(caches)])
    flags[READY] = 1
    for layer in range(3):
        assert torch.equal(offload(batch, layer), case.run())
    steps = [(step.turn, step.task) for step in relay.finish()]
    assert steps == [(0, 1), (1, 1), (0, 0), (2, 1), (1, 0), (2, 0)]
    page, row = divmod(int(slot), case.k_cache.shape[2])
    assert torch.equal(rows[0, 0], case.k_cache[page, :, row].float())


@pytest.mark.parametrize("to_host", [True, False])
def test_a_cancelled_iteration_lets_nobody_wait_and_the_next_one_is_right(*, to_host: bool) -> None:
    relay, layers = Relay(), make_layers()
    transfer = make_transfer(NUM_LAYERS, SLOTS, to_host=to_host)
    task = transfer.task(HostCaches(layers))
    relay.start([task])
    relay.cancel()
    Device(transfer, random_rows(), lambda: None).join()
    with pytest.raises(RuntimeError, match="the iteration was cancelled"):
        relay.finish()
    rows = random_rows()
    relay.start([task])
    device = Device(transfer, rows, lambda: None)
    device.join()
    assert len(relay.finish()) == NUM_LAYERS
    stored = torch.stack([read(layer, SLOTS, torch.float32) for layer in layers])
    assert torch.equal(stored, rows if to_host else torch.stack(device.taken))


@pytest.mark.parametrize(
    ("to_host", "said"),
    [
        (True, "the GPU did not hand over a prompt's KV of layer 1 within 1.0 s"),
        (False, "the GPU did not take over a prompt's KV of layer 0 within 1.0 s"),
    ],
)
def test_a_gpu_that_stops_is_given_up_and_where_it_stood_is_told(said: str, *, to_host: bool) -> None:
    relay, transfer = Relay(), make_transfer(NUM_LAYERS, SLOTS, to_host=to_host)
    task = transfer.task(HostCaches(make_layers()))
    relay.start([task], timeout_s=1.0)
    if to_host:
        transfer.flags[READY, 0, 0] = 1
    with pytest.raises(RelayStalledError, match=f"^{said}$"):
        relay.finish()
    assert bool((transfer.flags[DONE, :, 0] == 1).all())  # later waits are released as well
    relay.start([task], timeout_s=60)
    Device(transfer, random_rows(), lambda: None).join()
    assert len(relay.finish()) == NUM_LAYERS


def test_a_relay_that_waits_with_transfers_alone_leaves_the_cpu_to_others() -> None:
    relay, caches = Relay(), HostCaches(make_layers())
    relay.start([make_transfer(NUM_LAYERS, SLOTS, to_host=True).task(caches)])
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.2  # without pauses it would use 0.4 s
    relay.close()
