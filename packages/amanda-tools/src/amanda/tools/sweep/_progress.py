"""How far a sweep is, on stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID


class Progress:
    """A bar on a terminal; elsewhere a line for each point."""

    def __init__(self, shown: bool) -> None:
        from rich import progress
        from rich.console import Console

        self._console: Console | None = Console(stderr=True, soft_wrap=True) if shown else None
        self._bar: progress.Progress | None = None
        self._task: TaskID | None = None
        self._count = self._total = 0
        self._told = ""
        if self._console is not None and self._console.is_terminal:
            columns = (
                progress.TextColumn("{task.description}"), progress.BarColumn(),
                progress.MofNCompleteColumn(), progress.TimeRemainingColumn(),
            )  # fmt: skip
            self._bar = progress.Progress(*columns, console=self._console, transient=True)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=None)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, total: int, told: str, count: int = 0) -> None:
        """A point is about to be measured, after so many."""
        self._count, self._total, self._told = count, total, told
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=told, total=total, completed=count)

    def done(self, outcome: str) -> None:
        """It was."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._count + 1)
        elif self._console is not None:
            line = f"{self._count + 1}/{self._total} {self._told}: {outcome}"
            self._console.print(line, highlight=False, markup=False)
