"""Results as files have them."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from amanda.errors import AmandaError
from amanda.options import checked
from amanda.plugins import tool_class
from amanda.tools.results._files import read_json, schema_of
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
        """Return a table of what any result's `to_dict` gave.  Raises KeyError or TypeError for others."""
        rows = found["rows"]
        columns = [_column(one, [row[one["name"]] for row in rows]) for one in found["columns"]]
        told = {"schema", "version", "title", "notes", "columns", "rows"}
        return cls(
            str(found["schema"]).removeprefix("amanda."), found["version"], columns,
            [[row[column.name] for column in columns] for row in rows], found["title"], found["notes"],
            {name: value for name, value in found.items() if name not in told},
        )  # fmt: skip


@checked
def load(path: str | Path) -> Result:
    """Load a result that `save` wrote as JSON: in its tool's class, or as a table without the tool.

    Raises AmandaError for a file that is none of a result, or of a version that its tool does not read.
    """
    return read_json(path, "file of a result", restored)


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


def _column(told: Mapping[str, Any], values: Sequence[Any]) -> Column:
    numbers = [value for value in values if isinstance(value, (int, float))]
    unit = told.get("unit", "")
    show: Any = partial(shortened, width=44)
    if numbers and unit == "share":
        show = "{:.1%}".format
    elif numbers:
        show = partial(amount, unit=unit) if unit == "B" else _number
    total = bool(told.get("total", False))
    return Column(told["name"], show, total, bool(numbers), unit=unit, merge=told.get("merge", ""))


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
