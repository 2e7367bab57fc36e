"""A TLS connection for one reader thread and one writer thread."""

import select
import ssl
import threading
from collections.abc import Callable
from functools import partial


class SharedTls:
    """The socket interface that `Channel` needs, over an SSLSocket.

    OpenSSL connections are not safe for two concurrent threads. So each call into OpenSSL takes a lock and
    never blocks; threads wait for the network without the lock.

    Args:
        connection: connected and authenticated; owned by this object from now on.
    """

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._connection = connection
        self._timeout_s = connection.gettimeout()
        self._lock = threading.Lock()
        connection.setblocking(False)

    def settimeout(self, timeout_s: float | None) -> None:
        """Set the timeout of later waits; None: wait for ever."""
        self._timeout_s = timeout_s

    def sendall(self, data: memoryview | bytes) -> None:
        """Send all bytes; raise TimeoutError if the peer does not receive them."""
        view = memoryview(data)
        while view:
            count = self._without_blocking(partial(self._connection.send, view))
            view = view[count:]

    def recv_into(self, view: memoryview) -> int:
        """Wait for bytes; return their number, 0 at the end of the connection."""
        return self._without_blocking(partial(self._connection.recv_into, view))

    def recv(self, most: int) -> bytes:
        """Wait for bytes and return them; empty at the end of the connection."""
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
            raise ConnectionError("the connection is closed") from None
        if not poll.poll(None if self._timeout_s is None else 1e3 * self._timeout_s):
            raise TimeoutError("timed out")

    def shutdown(self, how: int) -> None:
        """End one direction or both; waiting threads wake up."""
        with self._lock:
            self._connection.shutdown(how)

    def close(self) -> None:
        self._connection.close()
