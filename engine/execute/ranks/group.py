"""All-reduces among the ranks of a model, over the links within this computer."""

import os
import socket
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, distributed

from neo_desktop.models.rank import Rank


class BrokenGroupError(RuntimeError):
    """A rank has ended or timed out, so the other ranks cannot continue either."""


class Group:
    """The tensor-parallel group of a model; a process can be in one group at a time.

    The constructor blocks until all ranks call it. NCCL does the all-reduces on GPUs, gloo on CPUs.

    Args:
        folder: A folder shared by all ranks, for no other use.
        timeout_s: Timeout of an all-reduce.

    Raises:
        RuntimeError: The ranks do not find each other.
    """

    def __init__(self, rank: Rank, folder: Path, device: torch.device, timeout_s: float) -> None:
        self.rank = rank
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        if loopback is not None:  # do not listen on the network
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=(folder / "ranks").as_uri(),
            rank=rank.number,
            world_size=rank.count,
            timeout=timedelta(seconds=timeout_s),
        )
        self.sum(torch.zeros(1, device=device))  # allocates the memory for all-reduces now

    def sum(self, part: Tensor) -> None:
        """All-reduce `part` in place.

        Raises:
            BrokenGroupError: Another rank has ended or timed out.
        """
        try:
            distributed.all_reduce(part)
        except RuntimeError as error:
            raise BrokenGroupError(f"an all-reduce among the ranks failed ({error})") from error

    def close(self) -> None:
        """Leave the group."""
        if distributed.is_initialized():
            distributed.destroy_process_group()
