"""Progress of measurements, on stderr."""

from __future__ import annotations


class Progress:
    """A bar on a terminal; elsewhere a line for each point."""

    def __init__(self, shown: bool) -> None:
        from rich import progress
        from rich.console import Console

        self._console = Console(stderr=True, soft_wrap=True)
        self._lines = shown and not self._console.is_terminal
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"), progress.BarColumn(),
            progress.MofNCompleteColumn(), progress.TimeRemainingColumn(),
            console=self._console, transient=True, disable=self._lines or not shown,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None)
        self._count = self._total = 0
        self._told = ""

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if not self._bar.disable:  # else it would end a line that nobody began
            self._bar.stop()

    def begin(self, total: int, told: str, count: int = 0) -> None:
        """Say that a point is about to be measured, after so many."""
        self._count, self._total, self._told = count, total, told
        self._bar.update(self._task, description=told, total=total, completed=count)

    def done(self, outcome: str) -> None:
        """Say that it was."""
        self._bar.update(self._task, completed=self._count + 1)
        if self._lines:
            line = f"{self._count + 1}/{self._total} {self._told}: {outcome}"
            self._console.print(line, highlight=False, markup=False)
