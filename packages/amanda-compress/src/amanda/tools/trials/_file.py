"""The file that keeps outcomes of trials, so that a run which was interrupted goes on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amanda.errors import ArtefactError
from amanda.files import naming

if sys.platform != "win32":
    import fcntl


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
            self._hold()
            self._read(header)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TrialFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, key: str, record: Any) -> None:
        """Write the record of a trial, which replaces an earlier one of the key."""
        self.records[key] = record
        self._write([key, record])

    def _hold(self) -> None:
        """Lock the file until it is closed; raise ArtefactError if another process has it."""
        if sys.platform == "win32":
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArtefactError(f"{self.path} is being written by another process") from None
        except OSError:  # a file system without locks
            pass

    def _read(self, header: Mapping[str, Any]) -> None:
        """Read the records; write the header of a new file."""
        with naming(self.path, "read"):
            self._file.seek(0)
            try:
                *lines, unfinished = self._file.read().split("\n")
                entries = [json.loads(line) for line in lines]
            except ValueError as error:
                raise ArtefactError(f"{self.path} is no file of trials: {error}") from error
        if unfinished:
            with naming(self.path):
                size = sum(len(line.encode()) + 1 for line in lines)
                os.truncate(self.path, size)
        if not entries:
            self._write(header)
            return
        self._check(entries[0], header)
        try:
            self.records = dict(entries[1:])
        except (TypeError, ValueError) as error:
            raise ArtefactError(f"{self.path} is no file of trials: {error}") from error

    def _check(self, found: Any, header: Mapping[str, Any]) -> None:
        """Raise ArtefactError unless the header of the file is the one expected."""
        if found == header:
            return
        if not isinstance(found, dict) or found.get("format") != header["format"]:
            raise ArtefactError(f"{self.path} is no file of {header['format']} trials; give another file")
        options = found.get("options", {})
        names = [name for name, value in header["options"].items() if options.get(name) != value]
        differences = "; ".join(
            f"{name} was {options.get(name)!r} and is {header['options'][name]!r}" for name in names
        )
        raise ArtefactError(
            f"{self.path} has trials with other options: {differences or 'another version'}; "
            "give another file"
        )

    def _write(self, entry: Any) -> None:
        with naming(self.path):
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
