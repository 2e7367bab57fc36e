"""Another host on this computer: a network namespace behind a slow, lossy, narrow or cut cable.

The cable is a process that carries packets between two TUN devices; the namespace holds one device.
"""

import fcntl
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cable import MAX_PACKET_BYTES, Condition

_CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


class NoNetworkError(RuntimeError):
    """The system allows no namespaces or devices."""


class Cable:
    """Carries packets until `close`.

    Args:
        ends: files of two TUN devices, closed here.
    """

    def __init__(self, *ends: int) -> None:
        program = Path(__file__).with_name("cable.py")
        command = (sys.executable, "-S", str(program), *map(str, ends))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=ends)
        for end in ends:
            os.close(end)

    def set(self, condition: Condition) -> None:
        """Set the cable's condition."""
        assert self._process.stdin is not None
        self._process.stdin.write(condition.line())
        self._process.stdin.flush()

    def close(self) -> None:
        """End the cable's process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


@dataclass(frozen=True)
class Host:
    """A host behind a cable."""

    name: str
    address: str
    cable: Cable

    @property
    def prefix(self) -> tuple[str, ...]:
        """Command prefix that runs a command on the host."""
        return ("ip", "netns", "exec", self.name)


def run(*command: str) -> None:
    """Run a network command of the system."""
    if shutil.which(command[0]) is None:
        raise NoNetworkError(f"{command[0]} is not installed")
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if result.returncode:
        raise NoNetworkError(f"{' '.join(command)}: {result.stderr.strip()}")


def _device(name: str) -> int:
    """Create a TUN device; return the file of its packets."""
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
        NoNetworkError: the user or system lacks permission.
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
            if "cubic" in _CONTROLS.read_text():  # Linux's default, which finds the rate soonest
                way = (other, "dev", device, "src", mine, "congctl", "cubic")
                run(*prefix, "ip", "route", "replace", *way)
        cable = Cable(*ends)
        stack.callback(cable.close)
        yield Host(name, far, cable)
