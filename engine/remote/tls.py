"""A TLS connection that one thread reads while another one writes."""

import select
import ssl
import threading
from collections.abc import Callable
from functools import partial


class SharedTls:
    """What a channel needs of a socket, over an SSLSocket.

    OpenSSL's connections are not safe for two threads at once. So each call into it takes a lock and never
    blocks, and what waits for the network does so without the lock.

    Args:
        connection: connected, and greeted; not to be used by others from now on.
    """

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._connection = connection
        self._timeout_s = connection.gettimeout()
        self._lock = threading.Lock()
        connection.setblocking(False)

    def settimeout(self, timeout_s: float | None) -> None:
        """Let whoever begins to wait from now on wait for so long at most; None: for ever."""
        self._timeout_s = timeout_s

    def sendall(self, data: memoryview | bytes) -> None:
        """Send all bytes; TimeoutError: nobody takes them."""
        view = memoryview(data)
        while view:
            count = self._without_blocking(partial(self._connection.send, view))
            view = view[count:]

    def recv_into(self, view: memoryview) -> int:
        """Wait for bytes; return how many there are, 0 at the end of the connection."""
        return self._without_blocking(partial(self._connection.recv_into, view))

    def recv(self, most: int) -> bytes:
        """Wait for bytes, and return them; nothing at the end of the connection."""
        data = bytearray(most)
        return bytes(data[: self.recv_into(memoryview(data))])

    def _without_blocking(self, call: Callable[[], int]) -> int:
        while True:
            try:
                with self._lock:
                    return call()
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            self._wait(event)

    def _wait(self, event: int) -> None:
        poll = select.poll()
        try:
            poll.register(self._connection, event)
        except ValueError:  # another thread has closed it
            raise ConnectionError("the connection has ended") from None
        if not poll.poll(None if self._timeout_s is None else 1e3 * self._timeout_s):
            raise TimeoutError("timed out")

    def shutdown(self, how: int) -> None:
        """End one direction, or both, whoever waits for it."""
        with self._lock:
            self._connection.shutdown(how)

    def close(self) -> None:
        """Close it."""
        self._connection.close()
