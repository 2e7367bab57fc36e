"""The relay's copies: pieces of memory move to buffers in turn, controlled by flags in memory alone."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from neo_desktop.native.relay import DONE, READY, HostTask, Relay, RelayStalledError, copy_task, empty_flags

TIMEOUT_S = 60.0  # for expected events; only a defect waits until the end


class Copies:
    """Pieces of these sizes, and buffers for them."""

    def __init__(self, sizes: list[int], num_buffers: int, num_flags: int | None = None) -> None:
        generator = torch.Generator().manual_seed(len(sizes))
        self.sources = [torch.randint(256, (size,), generator=generator, dtype=torch.uint8) for size in sizes]
        self.buffers = [torch.zeros(max(sizes), dtype=torch.uint8) for _ in range(num_buffers)]
        self.flags = empty_flags(num_flags or len(sizes), pinned=False)

    @property
    def task(self) -> HostTask:
        return copy_task("weights", self.sources, self.buffers, self.flags)


def wait_until_done(copies: Copies, turn: int) -> Tensor:
    """Return the turn's piece, once it has arrived in its buffer."""
    end = time.monotonic() + TIMEOUT_S
    while not copies.flags[DONE, turn, 0]:
        assert time.monotonic() < end, f"piece {turn} does not come"
        time.sleep(0)
    return copies.buffers[turn % len(copies.buffers)][: len(copies.sources[turn])]


@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=9),
    num_buffers=st.integers(1, 3),
    more_flags=st.integers(0, 4),
)
def test_pieces_come_in_order_to_buffers_that_are_free(
    sizes: list[int], num_buffers: int, more_flags: int
) -> None:
    copies = Copies(sizes, num_buffers, len(sizes) + more_flags)
    relay = Relay()
    for _ in range(2):  # flags and buffers are used again
        relay.start([copies.task])
        for turn, source in enumerate(copies.sources):
            assert torch.equal(wait_until_done(copies, turn), source)
            behind = turn + num_buffers
            if behind < len(sizes):
                assert not copies.flags[DONE, behind, 0]  # its buffer is still in use
                copies.flags[READY, behind, 0] = 1
        assert [step.turn for step in relay.finish()] == list(range(len(sizes)))
    relay.close()


def test_a_device_that_takes_nothing_is_told() -> None:
    copies = Copies([10, 20, 30], 2)
    relay = Relay()
    relay.start([copies.task], timeout_s=0.1)
    wait_until_done(copies, 1)
    with pytest.raises(RelayStalledError, match="the GPU did not take weights that come before piece 2"):
        relay.finish()
    assert copies.flags[DONE, 2, 0] == 1  # its waiters are released
    relay.close()
