"""Progress of trials: on stderr, and in a file from which a run that was interrupted goes on."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from amanda.action import routine_name
from amanda.errors import AmandaError, ArtefactError
from amanda.files import naming

if sys.platform != "win32":
    import fcntl

T = TypeVar("T")

logger = logging.getLogger("amanda")


class Progress:
    """Show a bar on a terminal, elsewhere a line for each point."""

    def __init__(self, is_visible: bool) -> None:
        from rich import progress
        from rich.console import Console

        self._console = Console(stderr=True, soft_wrap=True)
        self._prints_lines = is_visible and not self._console.is_terminal
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"), progress.BarColumn(),
            progress.MofNCompleteColumn(), progress.TimeRemainingColumn(),
            console=self._console, transient=True, disable=self._prints_lines or not is_visible,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None)
        self._count = self._total = 0
        self._description = ""

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if not self._bar.disable:  # else it would end a line that nobody began
            self._bar.stop()

    def begin(self, total: int, description: str, count: int = 0) -> None:
        """Announce the measurement of a point.

        Args:
            total: Number of all points.
            description: Words for the point.
            count: Points measured before it.
        """
        self._count, self._total, self._description = count, total, description
        self._bar.update(self._task, description=description, total=total, completed=count)

    def done(self, outcome: str) -> None:
        """Report the outcome of the point."""
        self._bar.update(self._task, completed=self._count + 1)
        if self._prints_lines:
            line = f"{self._count + 1}/{self._total} {self._description}: {outcome}"
            self._console.print(line, highlight=False, markup=False)

    def advance(self, count: int, total: int, description: str, outcome: str) -> None:
        """Report that a number of trials have ended; away from a terminal, in twenty lines.

        Args:
            count: Trials that have ended.
            total: Number of all trials.
            description: Words for the last trial.
            outcome: Words for its result.
        """
        self.begin(total, description, count - 1)
        self._bar.update(self._task, completed=count)
        if count % max(1, total // 20) == 0:
            self.done(outcome)

    @staticmethod
    def attempt(measure: Callable[[], T], description: str) -> tuple[T | None, str]:
        """Return the value of a function of the user, and ""; or None and its exception, as text.

        The exception is logged with the description.  Errors of Amanda and interrupts reach the caller.

        Args:
            measure: Function of the user, without arguments.
            description: Words for the trial, in the log.
        """
        try:
            return measure(), ""
        except AmandaError:
            raise
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            logger.warning("%s: %s", description, error)
            return None, error


def check_number(value: Any, evaluate: Any, error: type[AmandaError], name: str = "") -> float:
    """Return a number, from the value that a function of the user, `evaluate`, returned.

    Args:
        value: What the function returned.
        evaluate: The function, for messages.
        error: Class of the error for a value that is not a number.
        name: Of the number, where it has to be finite; "" for a number that may be NaN or infinite.

    Raises:
        ValueError: For a number with a name that is not finite.
    """
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except (RuntimeError, TypeError, ValueError) as reason:  # torch's own, for several numbers
        raise error(
            f"{routine_name(evaluate)} gave {value!r}; give a number, such as an accuracy"
        ) from reason
    if name and not isfinite(number):
        raise ValueError(f"{name} is {number}")
    return number


class TrialFile:
    """Records of trials in a file of JSON lines, so that a run which was interrupted goes on.

    The first line says what the trials are of; each further line is one that ended.  A line is on the disk
    before the next trial begins, and an unfinished last line is dropped.

    Args:
        path: Made if there is none.
        kind: Of the trials, such as "sweep".
        options: That decide what the trials measure, as JSON has them.

    Raises:
        ArtefactError: For a file of other trials, or one that another process writes.  FileError for one that
            cannot be read or written.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str, options: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.records: dict[str, Any] = {}
        """The record of each trial, by its key."""
        header = json.loads(json.dumps({"format": f"amanda {kind}", "version": 1, "options": options}))
        with naming(self.path):
            self._file = self.path.open("a+", encoding="utf-8")
        try:
            self._lock()
            self._read_records(header)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TrialFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, key: str, record: Any) -> None:
        """Write the record of a trial, which replaces an earlier one of the key.

        Args:
            key: Key of the trial, under which `records` has the record.
            record: What the trial measured, as JSON has it.
        """
        self.records[key] = record
        self._write([key, record])

    def _lock(self) -> None:
        """Lock the file until it is closed; raise ArtefactError if another process has it."""
        if sys.platform == "win32":
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArtefactError(f"{self.path} is being written by another process") from None
        except OSError:  # a file system without locks
            pass

    def _read_records(self, header: Mapping[str, Any]) -> None:
        """Read the records, and cut off an unfinished last line; write the header of a new file.

        Raises ArtefactError for a file of other trials.
        """
        with naming(self.path, "read"):
            self._file.seek(0)
            try:
                *lines, unfinished = self._file.read().split("\n")
                entries = [json.loads(line) for line in lines]
            except ValueError as error:
                raise ArtefactError(f"{self.path} is no file of trials: {error}") from error
        if unfinished:  # a line that an interrupt has cut: the next record begins in its place
            with naming(self.path):
                size = sum(len(line.encode()) + 1 for line in lines)
                os.truncate(self.path, size)
        if not entries:
            self._write(header)
            return
        self._check_header(entries[0], header)
        try:
            self.records = dict(entries[1:])
        except (TypeError, ValueError) as error:
            raise ArtefactError(f"{self.path} is no file of trials: {error}") from error

    def _check_header(self, first_entry: Any, header: Mapping[str, Any]) -> None:
        """Raise ArtefactError unless the first entry of the file is the header."""
        if first_entry == header:
            return
        if not isinstance(first_entry, dict) or first_entry.get("format") != header["format"]:
            raise ArtefactError(f"{self.path} is no file of {header['format']} trials; give another file")
        options = first_entry.get("options", {})
        present = header["options"]
        differences = "; ".join(
            f"{name} was {options.get(name)!r} and is {present.get(name)!r}"
            for name in {**options, **present}
            if options.get(name) != present.get(name)
        )
        raise ArtefactError(
            f"{self.path} has trials with other options: {differences or 'another version'}; "
            "give another file"
        )

    def _write(self, entry: Any) -> None:
        """Append an entry as a line of JSON, on disk before this returns."""
        with naming(self.path):
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
