"""The command `worker`: this computer holds KV of another one's chats, and attends to it."""

import logging
import signal
import socket

import torch
from rich.markup import escape

from neo_desktop import native
from neo_desktop.app.commands.options import WorkerOptions
from neo_desktop.app.commands.terminal import stdout
from neo_desktop.engine.loading import choose_device
from neo_desktop.engine.profiling.hardware import host_memory
from neo_desktop.engine.remote.cluster import HEAD_PORT, check_ray, offer
from neo_desktop.engine.remote.link import Address
from neo_desktop.engine.remote.trust import make_secret, read_secret
from neo_desktop.engine.remote.worker import AttentionWorker
from neo_desktop.engine.setup import bind_threads

GIB = 1 << 30
SHARE = 0.8  # of the memory that is available, for KV, unless a cap says how much


def run_worker(options: WorkerOptions) -> None:
    """Serve engines, one after the other, until Ctrl-C or a SIGTERM. ValueError, OSError: see the message."""
    made = make_secret(options.worker_secret)
    secret = read_secret(options.worker_secret)
    device = _device(options.device)
    available = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory().available_bytes
    memory = int(SHARE * available if options.memory is None else min(options.memory * GIB, available))
    if options.connect is not None:
        _offer(options, secret, memory)
        return
    address = Address.parse(options.listen, least_port=0)
    bind_threads()
    if options.threads is not None:
        native.set_default_num_threads(options.threads)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.create_server((address.host, address.port), family=family, backlog=16) as listener:
        worker = AttentionWorker(listener, secret, memory, device)
        # Ctrl-C and SIGTERM come to the thread that accepts, and end that.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: worker.close())
        if made is not None:
            stdout.print(f"A secret was made: copy {escape(str(made))} to the computer of the engine.")
        is_gpu = device.type == "cuda"
        where_it_attends = str(device) if is_gpu else f"{native.default_num_threads()} threads"
        where = Address(*listener.getsockname()[:2])
        stdout.print(
            f"Attention worker: [bold]{where}[/], {memory / GIB:.1f} GiB for KV, "
            f"{where_it_attends}, not encrypted",
            highlight=False,
            soft_wrap=True,
        )
        logging.getLogger("neo_desktop.engine.remote").setLevel(logging.INFO)
        worker.serve()
    stdout.print("Stopped.")


def _offer(options: WorkerOptions, secret: bytes, memory: int) -> None:
    """Be a part of a cluster until Ctrl-C, a SIGTERM, or its end."""
    check_ray()
    if options.threads is not None or options.device != "cpu":
        raise ValueError("--threads and --device do not go with --connect: let the worker listen instead")
    head = Address.parse(options.connect or "", default_port=HEAD_PORT)
    node = offer(head, secret, memory)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: node.terminate())
    stdout.print(
        f"Attention worker of the cluster at [bold]{head}[/], {memory / GIB:.1f} GiB for KV",
        highlight=False,
        soft_wrap=True,
    )
    status = node.wait()
    if status > 0:
        raise RuntimeError(f"Ray has ended with status {status}: is {head} the address of a server's Ray?")
    stdout.print("Stopped.")


def _device(name: str) -> torch.device:
    """Return the device of that name; ValueError: it is unknown, or missing."""
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and (kind == "cpu" or not number.isdecimal())):
        raise ValueError(f"--device {name!r} is unknown: choose cpu, cuda or cuda:N")
    device, index = choose_device(kind), int(number or 0)
    if device.type == "cpu":
        return device
    if index >= torch.cuda.device_count():
        raise ValueError(f"there is no GPU {index}: this computer has {torch.cuda.device_count()}, from 0 on")
    return torch.device("cuda", index)
