"""Results as files have them."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from amanda.errors import AmandaError
from amanda.options import checked
from amanda.plugins import tool_class
from amanda.tools.results._files import number_of, read_json, schema_of
from amanda.tools.results._result import Column, Result
from amanda.tools.results._text import amount, shortened


class Table(Result):
    """Rows under columns, of any tool: what its file tells, or what several of them came to."""

    def __init__(
        self,
        name: str,
        version: int,
        columns: Sequence[Column],
        rows: Sequence[Sequence[Any]],
        title: str = "",
        notes: Sequence[str] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.version = name, version  # type: ignore[misc]
        self.columns = tuple(columns)  # type: ignore[misc]
        self.title = title
        self._rows, self._notes, self._facts = list(rows), tuple(notes), dict(facts or {})

    def rows(self) -> Sequence[Sequence[Any]]:
        """The rows."""
        return self._rows

    def notes(self) -> Sequence[str]:
        """Return the notes of the result."""
        return self._notes

    def facts(self) -> Mapping[str, Any]:
        """Return the facts of the result."""
        return self._facts

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Table:
        """Return a table of what any result's `to_dict` gave.  Raises KeyError, TypeError or ValueError."""
        version, title, rows = found["version"], found["title"], found["rows"]
        if type(version) is not int or not isinstance(title, str):
            raise ValueError(f"its version is {version!r}, and its title {title!r}")
        columns, values = [], []
        for told in found["columns"]:
            column, those = _column(told, [row[told["name"]] for row in rows])
            columns.append(column)
            values.append(those)
        told_apart = {"schema", "version", "title", "notes", "columns", "rows"}
        return cls(
            str(found["schema"]).removeprefix("amanda."), version, columns, list(zip(*values, strict=True)),
            title, [str(note) for note in found["notes"]],
            {name: value for name, value in found.items() if name not in told_apart},
        )  # fmt: skip


@checked
def load(path: str | Path) -> Result:
    """Load a result that `save` wrote as JSON: in its tool's class, or as a table without the tool.

    Raises AmandaError for a file that is none of a result, or of a version that its tool does not read.
    """
    return read_json(path, "file of a result", _shown)


def _shown(found: Mapping[str, Any]) -> Result:
    """Return a result that can be shown, saved and merged, so that a crafted file is refused here."""
    result: Any = restored(found)
    result.to_dict()
    str(result)
    if hasattr(type(result), "merged"):
        result.merged(result)
    return cast(Result, result)


def restored(found: Mapping[str, Any], like: Result | None = None) -> Result:
    """A result from what its `to_dict` gave; `like` is one of the class that it had, where that is known."""
    schema = schema_of(found)
    if not schema.startswith("amanda."):
        raise ValueError(f"its schema is {schema!r}; expected one that begins with 'amanda.'")
    name = schema.removeprefix("amanda.")
    kind: Any = type(like) if like is not None and like.name == name else _result_of(name)
    if not hasattr(kind, "from_dict"):
        return Table.of(found)
    result: Result = kind.from_dict(found)
    known = set(result.notes())
    result.remarks = [note for note in found.get("notes", ()) if note not in known]
    return result


def _result_of(name: str) -> type | None:
    """The class of what a tool's `result` gives, as its annotation says."""
    try:
        kind: Any = tool_class(name)
        told = typing.get_type_hints(kind.result.fget)["return"]
    except (AmandaError, AttributeError, NameError, KeyError):
        return None
    return told if isinstance(told, type) and getattr(told, "name", None) == name else None


def _column(told: Mapping[str, Any], values: Sequence[Any]) -> tuple[Column, Sequence[Any]]:
    """Return a column of a file, and its values: numbers if all are, without those that are missing."""
    name, unit, merge = told["name"], told.get("unit", ""), told.get("merge", "")
    if not isinstance(name, str) or not isinstance(unit, str) or merge not in _MERGES:
        raise ValueError(f"it has a column {dict(told)}")
    numbers = [number_of(value) for value in values]
    there = [value for value in numbers if value is not None]
    if not there or not all(isinstance(value, (int, float)) for value in there):
        if there:
            merge = ""
        return Column(
            name, _text, bool(told.get("total", False)) and not there, unit=unit, merge=merge
        ), values
    show: Any = partial(amount, unit=unit) if unit == "B" else "{:.1%}".format if unit == "share" else _number
    return Column(name, show, bool(told.get("total", False)), number=True, unit=unit, merge=merge), numbers


_MERGES = ("", *(word for word in typing.get_args(typing.get_type_hints(Column)["merge"]) if word))


def _text(value: Any) -> str:
    return shortened(str(value), 44)


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
