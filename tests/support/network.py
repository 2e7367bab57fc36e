"""Another host on this computer: a network namespace behind a cable that can be slow, lossy or cut.

The cable is a thread that carries packets between two TUN devices, one of which is in the namespace.
"""

import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

MAX_PACKET_BYTES = 9000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


class NoNetworkError(RuntimeError):
    """No namespaces or devices can be made here."""


class Cable:
    """Carries packets until `close`."""

    def __init__(self, near: int, far: int) -> None:
        self.delay_s = 0.0
        self.loss = 0.0  # the share of packets that never arrive
        self.is_cut = False
        self._other = {near: far, far: near}
        self._rng = random.Random(0)
        self._is_closed = False
        self._thread = threading.Thread(target=self._carry, name="cable", daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        on_the_way: list[tuple[float, int, int, bytes]] = []
        numbers = itertools.count()
        while not self._is_closed:
            wait_s = max(on_the_way[0][0] - time.monotonic(), 0.0) if on_the_way else 0.05
            for end in select.select([*self._other], [], [], wait_s)[0]:
                packet = os.read(end, MAX_PACKET_BYTES)
                if not self.is_cut and self._rng.random() >= self.loss:
                    due_s = time.monotonic() + self.delay_s
                    heapq.heappush(on_the_way, (due_s, next(numbers), self._other[end], packet))
            while on_the_way and on_the_way[0][0] <= time.monotonic():
                _, _, end, packet = heapq.heappop(on_the_way)
                os.write(end, packet)

    def close(self) -> None:
        """End it."""
        self._is_closed = True
        self._thread.join(20)
        for end in self._other:
            os.close(end)


@dataclass(frozen=True)
class Host:
    """The other host."""

    name: str
    address: str
    cable: Cable

    @property
    def prefix(self) -> tuple[str, ...]:
        """What runs a command there."""
        return ("ip", "netns", "exec", self.name)


def run(*command: str) -> None:
    """Run a command of the system's network."""
    if shutil.which(command[0]) is None:
        raise NoNetworkError(f"{command[0]} is not installed")
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if result.returncode:
        raise NoNetworkError(f"{' '.join(command)}: {result.stderr.strip()}")


def _device(name: str) -> int:
    """Make a TUN device; return the file through which its packets come and go."""
    try:
        end = os.open(Path("/dev/net/tun"), os.O_RDWR)
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError as error:
        raise NoNetworkError(f"/dev/net/tun: {error}") from None
    return end


@contextmanager
def another_host() -> Iterator[Host]:
    """Make a host behind a cable.

    Raises:
        NoNetworkError: this user or system cannot.
    """
    name = f"neo{os.getpid()}"
    near, far = (f"10.77.{os.getpid() % 250}.{number}" for number in (1, 2))
    run("ip", "netns", "add", name)
    with ExitStack() as stack:
        stack.callback(run, "ip", "netns", "delete", name)
        ends = _device(f"{name}a"), _device(f"{name}b")
        run("ip", "link", "set", f"{name}b", "netns", name)
        for prefix, device, mine, other in (
            ((), f"{name}a", near, far),
            (("ip", "netns", "exec", name), f"{name}b", far, near),
        ):
            run(*prefix, "ip", "address", "add", mine, "peer", other, "dev", device)
            run(*prefix, "ip", "link", "set", device, "mtu", str(MAX_PACKET_BYTES), "up")
        cable = Cable(*ends)
        stack.callback(cable.close)
        yield Host(name, far, cable)
