"""The worker's side: it waits for an engine and attends for it, one engine at a time."""

import logging
import socket
import threading
from typing import Any

import torch

from neo_desktop.engine.remote.session import CPU, Session, fitting_blocks
from neo_desktop.engine.remote.shape import AttentionShape
from neo_desktop.engine.remote.trust import RefusedError, check_secret, welcome
from neo_desktop.engine.remote.wire import Channel, Kind, ProtocolError, end, tune

logger = logging.getLogger(__name__)

GREETING_S = 10.0  # for a peer to authenticate
MAX_GREETINGS = 16  # concurrently
END_S = 5.0  # for a closed connection to finish running work


class AttentionWorker:
    """Listens for engines; connections are neither encrypted nor signed.

    Args:
        memory_bytes: for KV.
        device: stores the KV and attends.

    Raises:
        ValueError: the secret is too short.
    """

    def __init__(
        self, listener: socket.socket, secret: bytes, memory_bytes: int, device: torch.device = CPU
    ) -> None:
        self._listener = listener
        self._secret = check_secret(secret)
        self._memory_bytes, self._device = memory_bytes, device
        self._session: Session | None = None  # with the current engine
        self._changes = threading.Lock()
        self._greetings = threading.BoundedSemaphore(MAX_GREETINGS)
        self._answering: set[threading.Thread] = set()
        self._is_closed = False

    def serve(self) -> None:
        """Accept connections until `close`, and return once no thread attends.

        If Python exits while a thread is in a native function, the process ends with an error.
        """
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                if not self._is_closed:
                    raise
                break
            if not self._greetings.acquire(blocking=False):
                connection.close()
                continue
            name = f"{address[0]}:{address[1]}"
            threading.Thread(target=self._answer, args=(connection, name), daemon=True).start()
        # Without the lock, which a signal handler in this thread may need.
        for thread in list(self._answering):
            thread.join(END_S)

    def close(self) -> None:
        """Close all connections, and end `serve`."""
        self._is_closed = True
        end(self._listener)
        with self._changes:
            if self._session is not None:
                self._session.end()

    def _answer(self, connection: socket.socket, name: str) -> None:
        try:
            channel = self._welcomed(connection, name)
        finally:
            self._greetings.release()
        if channel is None:
            return
        with self._changes:
            self._answering.add(threading.current_thread())
        try:
            self._serve(channel, name)
        except ConnectionError as error:
            logger.info("the engine at %s is gone: %s", name, error)
            channel.fail(error)
        except Exception as error:
            logger.exception("a request of the engine at %s failed", name)
            channel.fail(error)
        finally:
            channel.close()
            with self._changes:
                self._answering.discard(threading.current_thread())

    def _welcomed(self, connection: socket.socket, name: str) -> Channel | None:
        """Return the channel of an authenticated peer; None: authentication failed."""
        try:
            connection.settimeout(GREETING_S)
            tune(connection)
            welcome(connection, self._secret)
            connection.settimeout(None)
            return Channel(connection)
        except OSError as error:
            logger.warning("%s was refused: %s", name, error)
            connection.close()
            return None

    def _serve(self, channel: Channel, name: str) -> None:
        header = channel.answer(Kind.SET_UP)
        asked = channel.json(header)
        session = self._session_of(asked, channel)
        logger.info("attending for the engine at %s: %d blocks", name, session.num_blocks)
        try:
            channel.send_json(Kind.READY, {"num_blocks": session.num_blocks})
            session.serve(channel)
        except Exception as error:
            channel.fail(error)
            raise
        finally:
            session.end()
            with self._changes:
                if self._session is session:
                    self._session = None

    def _session_of(self, asked: Any, channel: Channel) -> Session:
        names = asked.get("engine"), asked.get("session")
        if not all(isinstance(name, str) for name in names):
            raise ProtocolError("the session is missing")
        if asked.get("joins"):
            with self._changes:
                joined = self._session
                if joined is not None and joined.names == names:
                    return joined
            raise ProtocolError("the session is over")
        shape, most = AttentionShape.from_json(asked.get("shape")), asked.get("most_blocks")
        if not isinstance(most, int) or most < 1:
            raise ProtocolError("the number of useful blocks is missing")
        num_blocks = min(fitting_blocks(shape, self._memory_bytes), most)
        sinks = None
        if shape.attention_sinks:
            sinks = torch.empty(shape.num_layers, shape.num_heads, dtype=torch.float32)
            channel.read_into(channel.answer(Kind.SET_UP), sinks)
        with self._changes:
            if self._is_closed:
                raise RefusedError("this worker is shutting down")
            if (lost := self._session) is not None:
                if lost.names[0] != names[0]:
                    raise RefusedError("this worker attends for another engine")
                lost.end()  # the engine has lost it
            self._session = Session(names, shape, sinks, num_blocks, self._device)
            return self._session
