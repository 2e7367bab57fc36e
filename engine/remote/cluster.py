"""Workers managed by Ray: one per computer that joined with `neo-desktop worker --connect`.

Ray tracks the computers and restarts workers that ended. KV, queries and outputs use the workers' own
connections. The secret never passes through Ray: each computer has it in its environment. Ray accepts only
peers with a token derived from the secret.
"""

import hmac
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from neo_desktop.engine.remote.link import Address
from neo_desktop.engine.remote.trust import SECRET_VARIABLE, read_secret
from neo_desktop.engine.remote.worker import AttentionWorker

HEAD_PORT = 6379  # Ray's own default
RESOURCE = "neo_desktop_worker"  # a computer that offers itself has one
MEMORY_VARIABLE = "NEO_DESKTOP_WORKER_MEMORY"  # memory for KV, in bytes
START_S = 120.0  # timeout for the start of a head
ANSWER_S = 3.0
MIN_STORE_BYTES = 80_000_000  # of Ray's object store, which is unused
# Ray starts many processes; disable all that are not needed.
_START = ("-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=0", "--disable-usage-stats")


def check_ray() -> None:
    """Raise ValueError if Ray is not installed."""
    if find_spec("ray") is None:
        raise ValueError(
            f"a number of workers requires Ray: {sys.executable} -m pip install 'neo-desktop[workers]', "
            "or list the workers' addresses"
        )


class AttentionActor:
    """An attention worker in a process that Ray started on one of its computers."""

    def __init__(self) -> None:
        import ray

        listener = socket.create_server((ray.util.get_node_ip_address(), 0), backlog=16)
        self._address: tuple[str, int] = listener.getsockname()[:2]
        self._worker = AttentionWorker(listener, read_secret(None), int(os.environ[MEMORY_VARIABLE]))
        threading.Thread(target=self._worker.serve, name="attention worker", daemon=True).start()

    def address(self) -> tuple[str, int]:
        return self._address


class Cluster:
    """The engine's view of Ray: it joins the cluster in RAY_ADDRESS, or starts a head for a new one.

    Args:
        num_workers: requested workers, which may join later.

    Raises:
        RuntimeError: Ray does not start.
    """

    def __init__(self, num_workers: int, secret: bytes) -> None:
        address = os.environ.get("RAY_ADDRESS")
        if address is None:
            os.environ |= token_of(secret)  # Ray reads it when imported
        import ray

        self._ray = ray
        self._head: subprocess.Popen[bytes] | None = None
        if address is None:
            address = f"127.0.0.1:{HEAD_PORT}"
            self._head = start_node(
                "--head", f"--port={HEAD_PORT}", "--include-dashboard=false", resources={}, env={}
            )
        try:
            self._join(address)
            make = ray.remote(num_cpus=0, resources={RESOURCE: 1}, max_restarts=-1)(AttentionActor)
            self._actors: list[Any] = [make.remote() for _ in range(num_workers)]
        except BaseException:
            self.close()
            raise

    def _join(self, address: str) -> None:
        waiting, until_s = threading.Event(), time.monotonic() + START_S
        while time.monotonic() < until_s:
            if self._head is not None and self._head.poll() is not None:
                raise RuntimeError(
                    f"Ray's head ended with status {self._head.returncode}: is port {HEAD_PORT} in use? "
                    "Set RAY_ADDRESS to use an existing cluster"
                )
            try:
                self._ray.init(address=address, logging_level="ERROR", log_to_driver=False)
                return
            except ConnectionError:
                if self._head is None:
                    raise
            waiting.wait(1.0)
        raise RuntimeError(f"Ray's head at {address} did not start within {START_S:.0f} s")

    @property
    def addresses(self) -> Sequence[Callable[[], Address]]:
        """Callables that return each worker's current address; ConnectionError: no computer runs it."""
        return [partial(self._address_of, actor) for actor in self._actors]

    def _address_of(self, actor: Any) -> Address:
        try:
            return Address(*self._ray.get(actor.address.remote(), timeout=ANSWER_S))
        except SystemExit:  # Ray raises it in waiting threads when it shuts down
            raise ConnectionError("the cluster has shut down") from None
        except self._ray.exceptions.GetTimeoutError:
            raise ConnectionError("no computer in the cluster is available for it yet") from None
        except self._ray.exceptions.RayError as error:
            raise ConnectionError(str(error).strip().partition("\n")[0]) from None

    def close(self) -> None:
        """Leave the cluster, which ends the workers; may be called again."""
        self._ray.shutdown()
        if self._head is not None:
            self._head.terminate()
            self._head.wait(60)


def token_of(secret: bytes) -> dict[str, str]:
    """Return the environment in which Ray accepts only peers that know the secret."""
    token = hmac.digest(secret, b"ray", "sha256").hex()
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def start_node(
    *options: str, resources: Mapping[str, int], env: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start the process that joins this computer to a cluster; SIGTERM ends it."""
    command = (sys.executable, *_START, f"--object-store-memory={MIN_STORE_BYTES}", *options)
    return subprocess.Popen(
        (*command, f"--resources={json.dumps(resources)}"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | dict(env),
    )


def offer(head: Address, secret: bytes, memory_bytes: int) -> "subprocess.Popen[bytes]":
    """Offer this computer to a cluster's engines for an attention worker."""
    return start_node(
        f"--address={head}",
        resources={RESOURCE: 1},
        env={SECRET_VARIABLE: secret.decode(), MEMORY_VARIABLE: str(memory_bytes), **token_of(secret)},
    )
