"""Tables, and which ops their rows are about."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from amanda.errors import AmandaError
from amanda.tools.results import number_of
from amanda.tools.view._files import Source

KEYS = ("phase", "type", "module", "source")
"""Columns that tell ops apart in every table of ops."""

Key = tuple[str, ...]
Row = Mapping[str, Any]


class Ops:
    """The ops of a page, and how rows find them."""

    def __init__(self, ops: Iterable[Row]) -> None:
        self._by_key: dict[Key, list[int]] = defaultdict(list)
        self._by_id: dict[tuple[str, str], list[int]] = defaultdict(list)
        for index, op in enumerate(ops):
            self._by_key[key_of(op)].append(index)
            if op.get("id") is not None:
                self._by_id[_id_and_phase(op)].append(index)

    def about(self, row: Row) -> list[int]:
        """Return the ops with a row's id, or with its phase, type, module and source."""
        indices = None if row.get("id") is None else self._by_id.get(_id_and_phase(row))
        return indices or self._by_key.get(key_of(row), [])


def _id_and_phase(row: Row) -> tuple[str, str]:
    """Return an op id as 16 hexadecimal digits, however a tool writes it, and the phase."""
    number = row["id"]
    text = f"{number:x}" if isinstance(number, int) else str(number).removeprefix("0x")
    return text.zfill(16), str(row.get("phase", ""))


def key_of(row: Row) -> Key:
    """Return what is the same in all tables for one op."""
    return tuple(str(row.get(key) or "") for key in KEYS)


def is_about_ops(source: Source) -> bool:
    """Return True if its rows say which op they are about."""
    rows = source.list_of("rows")
    return bool(rows) and all(key in rows[0] for key in KEYS)


def ops_named_by(*lists: Iterable[Row]) -> list[dict[str, Any]]:
    """Return ops without a graph, in the order in which rows name them, each place once."""
    places = {key_of(row): None for rows in lists for row in rows}
    return [dict(zip(KEYS, key, strict=True)) for key in places]


def table(source: Source, ops: Ops) -> dict[str, Any]:
    """Return columns and rows, with the ops of each row.

    `ops` is None where the table is about something else.  As many rows as there are ops of one key are
    theirs in turn, unless words tell the rows apart; otherwise each is about all of them.
    """
    columns = _columns(source)
    rows = source.list_of("rows")
    names = [column["name"] for column in columns]
    return {
        "name": source.name,
        "schema": source.schema,
        "title": _text(source.content.get("title")) or source.schema.removeprefix("amanda."),
        "columns": columns,
        "rows": [[number_of(row.get(name)) for name in names] for row in rows],
        "first": source.content.get("first"),
        "ops": _ops_of(rows, columns, ops) if is_about_ops(source) else None,
    }


def _ops_of(rows: Sequence[Row], columns: Sequence[Row], ops: Ops) -> list[list[int]]:
    ops_of_rows = [ops.about(row) for row in rows]
    words = {column["name"] for column in columns if not column["number"]} - {*KEYS, "id", "name"}
    if any(isinstance(row.get(word), str) for row in rows for word in words):
        return ops_of_rows  # which may tell rows of one op apart, as the name of a tensor does
    rivals: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, indices in enumerate(ops_of_rows):
        rivals[tuple(indices)].append(row)
    for claimed, claimants in rivals.items():
        if len(claimed) == len(claimants) > 1:
            for row, index in zip(claimants, claimed, strict=True):
                ops_of_rows[row] = [index]
    return ops_of_rows


def _columns(source: Source) -> list[dict[str, Any]]:
    rows, columns = source.list_of("rows"), source.content.get("columns")
    objects = [column for column in columns if isinstance(column, dict)] if isinstance(columns, list) else []
    columns_by_name = {column["name"]: column for column in objects if isinstance(column.get("name"), str)}
    names = dict.fromkeys((*columns_by_name, *(rows[0] if rows else ())))
    if not names and rows:
        raise AmandaError(f"{source.name}: the rows of {source.schema} are empty objects")
    return [
        {
            "name": name,
            "number": _are_numbers([row.get(name) for row in rows]),
            "total": bool(columns_by_name.get(name, {}).get("total")),
            "unit": _text(columns_by_name.get(name, {}).get("unit")),
        }
        for name in names
    ]


def _are_numbers(values: Sequence[Any]) -> bool:
    there = [number_of(value) for value in values if value is not None]
    return bool(there) and all(
        isinstance(number, (int, float)) and not isinstance(number, bool) for number in there
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
