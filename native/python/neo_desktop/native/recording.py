"""Native calls, recorded while they run and repeated in one call."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from neo_desktop.native import _native
from neo_desktop.native._native import Recording


def recorded(work: Callable[[], object]) -> Recording | None:
    """Do work, and return its native calls; None: it also computes by torch, or its calls cannot be repeated.

    Work may depend on the contents of tensors only. A recording repeats the calls with their present
    contents; the caller keeps the tensors' memory alive and in place.
    """
    _native.begin_recording()
    try:
        with _OtherWork() as others:  # type: ignore[no-untyped-call]
            work()
    finally:
        calls = _native.end_recording()
    return None if others.exists or not calls.is_complete else calls


class _OtherWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes torch's operators, except views."""

    exists = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import its compiler, for seconds."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # In inference mode, `contiguous`, `reshape` and `to` count as views, but may copy.
        is_view = func.is_view and _storages((*args, *(kwargs or {}).values())) >= _storages((result,))
        self.exists = self.exists or not is_view
        return result


def _storages(values: Sequence[Any]) -> set[int]:
    """Return the addresses of the memory behind tensors."""
    tensors = (each for each in tree_leaves(values) if isinstance(each, torch.Tensor))
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
