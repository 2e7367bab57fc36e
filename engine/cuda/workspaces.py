"""cuBLAS's working memory: torch keeps a piece of it for each stream of each thread, and gives none back.

A piece has 8 MiB, 32 MiB from compute capability 9.0 on. A captured graph goes on writing to the one that its
stream had: were it given back while the graph lives, the graph would write to memory that others have now.
So it is given back (`clear_workspaces`) only while there are no graphs; owners of graphs register themselves.
"""

import threading
from collections.abc import Callable
from weakref import WeakSet

import torch

_lock = threading.Lock()
_keepers: WeakSet[object] = WeakSet()


def keep_workspaces(keeper: object) -> None:
    """Say that `keeper` has graphs: nothing is given back until it lets go, or is gone itself."""
    with _lock:
        _keepers.add(keeper)


def let_workspaces_go(keeper: object) -> None:
    """Say that `keeper` has no graphs any more."""
    with _lock:
        _keepers.discard(keeper)


def clear_workspaces(device: torch.device) -> bool:
    """Give all working memory back to torch's allocator, unless graphs refer to it.

    What runs next takes as much as it needs anew.

    Returns:
        Whether it was done; a torch without the function keeps it, which costs memory and nothing else.
    """
    clear: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is None:
        return False
    torch.cuda.synchronize(device)
    with _lock:
        if _keepers:
            return False
        clear()
    return True
