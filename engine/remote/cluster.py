"""Workers that Ray keeps: one for each computer that has joined with `neo-desktop worker --connect`.

Ray knows who is there, and starts what has ended again. KV, queries and answers go through the workers' own
connections, and their secret never through Ray: each computer has it in its environment. Ray talks to nobody
who does not know a token, which is made of the secret.
"""

import hmac
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
from neo_desktop.engine.remote.worker import AttentionWorker, WorkerLimits

HEAD_PORT = 6379  # Ray's own default
RESOURCE = "neo_desktop_worker"  # of which a computer that offers itself has one
MEMORY_VARIABLE = "NEO_DESKTOP_WORKER_MEMORY"  # bytes for KV
START_S = 120.0  # for a head to start
ANSWER_S = 3.0
MIN_STORE_BYTES = 80_000_000  # Ray's object store, which nothing goes through
# Ray is a program of many processes: nothing but what is needed.
_START = ("-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=0", "--disable-usage-stats")


def check_ray() -> None:
    """Check that Ray is there; ValueError: it is not."""
    if find_spec("ray") is None:
        raise ValueError(
            "a number of workers needs Ray: pip install 'neo-desktop[workers]', or name the workers' "
            "addresses"
        )


class AttentionActor:
    """An attention worker in a process that Ray has started on one of its computers."""

    def __init__(self) -> None:
        import ray

        listener = socket.create_server((ray.util.get_node_ip_address(), 0), backlog=16)
        self._address: tuple[str, int] = listener.getsockname()[:2]
        limits = WorkerLimits(int(os.environ[MEMORY_VARIABLE]))
        self._worker = AttentionWorker(listener, read_secret(None), limits)
        threading.Thread(target=self._worker.serve, name="attention worker", daemon=True).start()

    def address(self) -> tuple[str, int]:
        """Return where it listens."""
        return self._address


class Cluster:
    """Ray, as an engine uses it. Joins the cluster that RAY_ADDRESS names; else it is the head of a new one.

    Args:
        num_workers: that are asked for; they may come later.
        secret: the workers'.

    Raises:
        RuntimeError: Ray does not start.
    """

    def __init__(self, num_workers: int, secret: bytes) -> None:
        address = os.environ.get("RAY_ADDRESS")
        if address is None:
            os.environ |= token_of(secret)  # Ray reads it as it is imported
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
                    f"Ray's head has ended with status {self._head.returncode}: is port {HEAD_PORT} in use? "
                    "RAY_ADDRESS names a cluster that is there"
                )
            try:
                self._ray.init(address=address, logging_level="ERROR", log_to_driver=False)
                return
            except ConnectionError:
                if self._head is None:
                    raise
            waiting.wait(1.0)
        raise RuntimeError(f"Ray's head at {address} has not started within {START_S:.0f} s")

    @property
    def addresses(self) -> Sequence[Callable[[], Address]]:
        """What tells where each worker listens now; ConnectionError: Ray has no computer for it."""
        return [partial(self._address_of, actor) for actor in self._actors]

    def _address_of(self, actor: Any) -> Address:
        try:
            return Address(*self._ray.get(actor.address.remote(), timeout=ANSWER_S))
        except SystemExit:  # so Ray ends threads that wait for it when it ends itself
            raise ConnectionError("the cluster has ended") from None
        except self._ray.exceptions.GetTimeoutError:
            raise ConnectionError("no computer of the cluster has offered itself for it yet") from None
        except self._ray.exceptions.RayError as error:
            raise ConnectionError(str(error).strip().partition("\n")[0]) from None

    def close(self) -> None:
        """Leave the cluster, which ends the workers; may be called again."""
        self._ray.shutdown()
        if self._head is not None:
            self._head.terminate()
            self._head.wait(60)


def token_of(secret: bytes) -> dict[str, str]:
    """Return the environment in which Ray talks to nobody who does not know the secret."""
    token = hmac.digest(secret, b"ray", "sha256").hex()
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def start_node(
    *options: str, resources: Mapping[str, int], env: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start what makes this computer part of a cluster; it ends with a SIGTERM."""
    stated = "{" + ", ".join(f'"{name}": {count}' for name, count in resources.items()) + "}"
    command = (sys.executable, *_START, f"--object-store-memory={MIN_STORE_BYTES}", *options)
    return subprocess.Popen(
        (*command, f"--resources={stated}"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | dict(env),
    )


def offer(head: Address, secret: bytes, memory_bytes: int) -> "subprocess.Popen[bytes]":
    """Let a cluster's engines have an attention worker on this computer."""
    return start_node(
        f"--address={head}",
        resources={RESOURCE: 1},
        env={SECRET_VARIABLE: secret.decode(), MEMORY_VARIABLE: str(memory_bytes), **token_of(secret)},
    )
