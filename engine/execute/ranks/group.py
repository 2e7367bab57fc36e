"""What the ranks of a model compute together: sums, which all of them get, over this computer's own links."""

import os
import socket
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, distributed

from neo_desktop.models.rank import Rank


class BrokenGroupError(RuntimeError):
    """A rank is gone, or too late: the others cannot go on, either."""


class Group:
    """The ranks of a model; a process can be in one at a time.

    Making it waits until all of them do so. Sums are NCCL's on GPUs and gloo's on CPUs.

    Args:
        rank: which of them this process is.
        folder: the same for all, and nobody else's.
        device: of this rank.
        timeout_s: with the slowest of them, for a sum.

    Raises:
        RuntimeError: they do not find each other.
    """

    def __init__(self, rank: Rank, folder: Path, device: torch.device, timeout_s: float) -> None:
        self.rank = rank
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        if loopback is not None:  # nobody else on the network is to reach them
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=(folder / "ranks").as_uri(),
            rank=rank.number,
            world_size=rank.count,
            timeout=timedelta(seconds=timeout_s),
        )
        self.sum(torch.zeros(1, device=device))  # what that needs of memory is taken now

    def sum(self, part: Tensor) -> None:
        """Put the sum over all ranks into what each of them gives.

        Raises:
            BrokenGroupError: see there.
        """
        try:
            distributed.all_reduce(part)
        except RuntimeError as error:
            raise BrokenGroupError(f"the parts of a sum did not come together ({error})") from error

    def close(self) -> None:
        """Leave the group."""
        if distributed.is_initialized():
            distributed.destroy_process_group()
