"""How far a long replay is, on a terminal's standard error; elsewhere nothing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Bar:
    """One line that goes again; silent where standard error is no terminal, or rich is not installed."""

    def __init__(self) -> None:
        self._progress = _progress() if sys.stderr is not None and sys.stderr.isatty() else None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, what: str) -> None:
        """Something that does not tell how far it is, until `tell` is called."""
        if self._progress is not None:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(what, total=None)

    def tell(self, done: float, of: int) -> None:
        """How much is done."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=of)


def _progress() -> Progress | None:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
