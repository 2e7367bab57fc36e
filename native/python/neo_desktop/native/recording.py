"""Native calls, recorded while they run and repeated in one call."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from neo_desktop.native import _native


class Recording:
    """Native calls in order. The caller keeps their tensors' memory alive and in place."""

    def __init__(self, calls: _native.Recording) -> None:
        self._calls = calls

    def append(self, later: "Recording") -> None:
        """Add calls behind these."""
        self._calls.append(later._calls)

    def __call__(self) -> None:
        """Repeat the calls, with the present contents of their tensors."""
        self._calls.run()


def recorded(work: Callable[[], object]) -> Recording | None:
    """Do work, and return its native calls; None: it also computes by torch, or its calls cannot be repeated.

    Work may depend on the contents of tensors only.
    """
    _native.begin_recording()
    try:
        with _OtherWork() as others:  # type: ignore[no-untyped-call]
            work()
    finally:
        calls = _native.end_recording()
    return None if others.exists or not calls.is_complete else Recording(calls)


class _OtherWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes torch's operators, except views."""

    exists = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.exists = self.exists or not func.is_view
        return func(*args, **(kwargs or {}))
