"""Records of the evaluations of a sweep, which a file keeps for a later run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from amanda.action import routine_name
from amanda.errors import ArtefactError
from amanda.tools.sweep._program import is_same
from amanda.tools.sweep._result import ALL
from amanda.tools.trials import TrialFile


class Record(NamedTuple):
    """One evaluation.  metric: None after an error.  cost: None without a function that measures it."""

    metric: float | None
    error: str
    seconds: float
    cost: float | None


def record_key(architecture: Mapping[str, str]) -> str:
    """Return the key of an architecture, the same in any order of its ops."""
    return json.dumps(architecture, sort_keys=True)


def option_words(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of tools as JSON has them, equal in each process: a function by its name and line."""
    return {name: _option_word(option) for name, option in options.items()}


def _option_word(option: Any) -> Any:
    """Return a number, a text or None as it is, a list of such as a list, and anything else by a name."""
    if isinstance(option, (list, tuple, set, frozenset)):
        words = [_option_word(element) for element in option]
        return words if isinstance(option, (list, tuple)) else sorted(words, key=repr)
    if option is None or isinstance(option, (str, bool, int, float)):
        return option
    # The repr of an object may have its address.
    return routine_name(option) if callable(option) else type(option).__name__


class SweepRecords:
    """The record of each evaluation by its key, and the file that keeps them, if any."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._file: TrialFile | None = None

    def get(self, architecture: Mapping[str, str]) -> Record | None:
        """Return the record of an architecture; None if it was not evaluated."""
        return self._records.get(record_key(architecture))

    def is_due(self, architecture: Mapping[str, str], attempt: int) -> bool:
        """Return True if an architecture was never evaluated, or failed and this is a further attempt."""
        record = self.get(architecture)
        return record is None or (attempt > 0 and bool(record.error))

    def add(self, architecture: Mapping[str, str], record: Record) -> None:
        """Add the record of an evaluation that ended; raise ArtefactError if the file has another metric."""
        key = record_key(architecture)
        if self._file is not None:
            self._write(self._file, key, record)
        self._records[key] = record

    @contextmanager
    def write_to(self, path: str | os.PathLike[str] | None, options: Mapping[str, Any]) -> Iterator[None]:
        """Read the records of a file, and write those of evaluations within this context; None: no file.

        Raises ArtefactError for a file of another sweep.
        """
        if path is None:
            yield
            return
        with TrialFile(path, "sweep", options) as file:
            try:
                records = {key: Record(**record) for key, record in file.records.items()}
                architectures = {key: dict(json.loads(key)) for key in records}
            except (TypeError, ValueError) as error:
                raise ArtefactError(f"{path} is no file of a sweep: {error}") from error
            for key, record in self._records.items():
                self._write(file, key, record)
            for key, record in records.items():
                # Evaluations without a tool and with all ops find the ops: each process runs them itself.
                if architectures[key] and ALL.name not in architectures[key]:
                    self._records.setdefault(key, record)
            self._file = file
            try:
                yield
            finally:
                self._file = None

    def _write(self, file: TrialFile, key: str, record: Record) -> None:
        """Write a record, unless the file has it; raise ArtefactError if the file has another metric."""
        earlier = None if key not in file.records else Record(**file.records[key])
        if earlier is None or earlier.metric is None:
            file.add(key, record._asdict())
        elif record.metric is not None and not is_same(record.metric, earlier.metric):
            raise ArtefactError(
                f"{file.path} is of another model, other data or other options: at {json.loads(key)} it has "
                f"{earlier.metric}, and this sweep {record.metric}; give another file"
            )
