"""cuBLAS workspaces: torch keeps one per stream and thread, and never frees them.

A workspace has 8 MiB, and 32 MiB from compute capability 9.0 on. A captured graph keeps writing to the
workspace of its stream. If the workspace were freed while the graph lives, the graph would overwrite memory
with a new owner. So `clear_workspaces` frees memory only while no graphs exist; owners of graphs register
themselves.
"""

import threading
from collections.abc import Callable
from weakref import WeakSet

import torch

_lock = threading.Lock()
_keepers: WeakSet[object] = WeakSet()


def keep_workspaces(keeper: object) -> None:
    """Keep all workspaces until `keeper`, which owns graphs, lets them go or is garbage-collected."""
    with _lock:
        _keepers.add(keeper)


def let_workspaces_go(keeper: object) -> None:
    """Drop the claim of `keeper`, which owns no graphs any more."""
    with _lock:
        _keepers.discard(keeper)


def clear_workspaces(device: torch.device) -> None:
    """Return all workspaces to torch's allocator, unless graphs refer to them.

    The next cuBLAS call allocates a new workspace. A torch without this function keeps them, which only costs
    memory.
    """
    clear: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is None:
        return
    torch.cuda.synchronize(device)
    with _lock:
        if not _keepers:
            clear()
