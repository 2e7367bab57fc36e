"""The progress of a load in the terminal."""

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.markup import escape

from neo_desktop.app.commands.terminal import progress_bar, stderr

if TYPE_CHECKING:
    from neo_desktop.app.shelf.hosting import ModelHost


class LoadingBar:
    """A bar that the terminal shows during a load only."""

    def __init__(self) -> None:
        self._progress = progress_bar()
        self._task = self._progress.add_task("Loading", total=1.0)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, share: float, what: str) -> None:
        """Show how far it is."""
        self._progress.update(self._task, completed=share, description=what)

    def follow(self, host: "ModelHost", on_loaded: Callable[[], None]) -> None:
        """Show every load of a host, and why one failed.

        Args:
            on_loaded: called when the first one has succeeded.
        """
        is_shown = has_loaded = False

        def changed() -> None:
            nonlocal is_shown, has_loaded
            if host.loading is not None:
                if not is_shown:
                    self._progress.start()
                    is_shown = True
                self.update(host.loading.share, host.loading.what)
            elif is_shown:
                self._progress.stop()
                is_shown = False
                if host.error is not None:
                    stderr.print(f"[bold red]error:[/] {escape(host.error)}", highlight=False, soft_wrap=True)
                elif host.has_weights and not has_loaded:
                    has_loaded = True
                    on_loaded()

        host.listeners.append(changed)
