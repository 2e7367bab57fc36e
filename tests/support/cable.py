"""A cable between two computers, as a process: `python cable.py NEAR FAR`, the files of two TUN devices.

It carries packets both ways, under the latest `Condition` from stdin (one per line, in JSON), and ends with
stdin. A thread would wait for Python's lock in a busy engine. If permitted, the process takes real-time
priority, so a busy computer hardly changes the imitated network.

A packet leaves after its predecessor in the same direction, so the rate limit holds from the first byte.
(The token buckets of `tc` let some bytes through at once, and not all kernels have its netem.)
"""

import json
import os
import random
import select
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass

MAX_PACKET_BYTES = 65_000  # large, so Python carries few packets
AT_ONCE = 8  # packets read before other files are polled


@dataclass(frozen=True)
class Condition:
    """Properties of a cable, equal in both directions."""

    delay_s: float = 0.0  # delay per packet
    bits_per_s: float = 0.0  # 0: unlimited
    loss: float = 0.0  # share of lost packets
    is_cut: bool = False

    def line(self) -> bytes:
        """Return the line for a cable's stdin."""
        return json.dumps(asdict(self)).encode() + b"\n"


class _Direction:
    """Packets in transit to one end."""

    def __init__(self, source: int, target: int) -> None:
        self._source, self._target = source, target
        self._packets: deque[tuple[float, bytes]] = deque()
        self._free_s = 0.0  # end of the last transmission
        self._rng = random.Random(source)

    @property
    def due_s(self) -> float:
        """Arrival time of the next packet."""
        return self._packets[0][0] if self._packets else float("inf")

    def take_in(self, condition: Condition) -> None:
        with suppress(BlockingIOError):
            for _ in range(AT_ONCE):
                packet = os.read(self._source, MAX_PACKET_BYTES)
                if condition.is_cut or self._rng.random() < condition.loss:
                    continue
                now_s = time.monotonic()
                takes_s = 8 * len(packet) / condition.bits_per_s if condition.bits_per_s else 0.0
                self._free_s = max(self._free_s, now_s) + takes_s
                self._packets.append((self._free_s + condition.delay_s, packet))

    def deliver(self) -> None:
        now_s = time.monotonic()
        while self._packets and self._packets[0][0] <= now_s:
            os.write(self._target, self._packets.popleft()[1])


def carry(near: int, far: int) -> None:
    """Carry packets until stdin ends."""
    condition = Condition()
    told = sys.stdin.fileno()
    directions = {near: _Direction(near, far), far: _Direction(far, near)}
    for end in directions:
        os.set_blocking(end, False)
    while True:
        due_s = min(direction.due_s for direction in directions.values())
        wait_s = None if due_s == float("inf") else max(due_s - time.monotonic(), 0.0)
        for end in select.select([told, *directions], [], [], wait_s)[0]:
            if end != told:
                directions[end].take_in(condition)
                continue
            lines = os.read(told, 1 << 16).splitlines()
            if not lines:
                return
            condition = Condition(**json.loads(lines[-1]))
        for direction in directions.values():
            direction.deliver()


if __name__ == "__main__":
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    carry(int(sys.argv[1]), int(sys.argv[2]))
