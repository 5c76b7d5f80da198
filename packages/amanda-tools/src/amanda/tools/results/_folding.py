"""Rows of repeated layers as one row: `layers.0-31.mlp.up_proj`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amanda.tools.results._result import Column

_INDEX = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
Rows = Sequence[Sequence[Any]]


def groups_of(columns: Sequence[Column], rows: Rows, order: str) -> list[Rows]:
    """Return rows in groups that differ in numbers, and in the first index in the module's path, alone.

    A group has one row of each module: the first of several equal ones, the second, and so on.
    order: the column whose sum puts the groups in order, the largest first; "" for the order of the rows.
    """
    names = [column.name for column in columns]
    if "module" not in names:
        return [[row] for row in rows]
    module = names.index("module")
    texts = [i for i, column in enumerate(columns) if not (column.total or column.number) and i != module]
    found: dict[tuple[Any, ...], list[Sequence[Any]]] = {}
    seen = Counter[tuple[Any, ...]]()
    for row in rows:
        told = tuple(str(row[i]) for i in texts)  # lists of packed weights are among them
        place = (row[module], *told)
        key = (_INDEX.sub("*", row[module], count=1), seen[place], *told)
        seen[place] += 1
        found.setdefault(key, []).append(row)
    groups: list[Rows] = list(found.values())
    if order in names:
        column = names.index(order)
        groups.sort(key=lambda group: -sum(row[column] or 0 for row in group))
    return groups


def cells_of(columns: Sequence[Column], group: Rows) -> list[str]:
    """Return the texts of a row that stands for a group: sums, equal values, or the least and the most."""
    return [_cell(column, [row[i] for row in group]) for i, column in enumerate(columns)]


def _cell(column: Column, values: Sequence[Any]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    if column.name == "module" and len(values) > 1:
        return column.show(_module(values))
    if len(values) == 1:
        return column.show(known[0])
    if column.total or column.folded == "sum":
        return column.show(sum(known))
    if column.folded == "mean":
        return column.show(sum(known) / len(known))
    least, most = column.show(min(known)), column.show(max(known))
    return least if least == most else f"{least} to {most}"


def _module(paths: Sequence[str]) -> str:
    """Return one path for all: the indices that differ as ranges."""
    indices = [found[0] for path in dict.fromkeys(paths) if (found := _INDEX.search(path))]
    return _INDEX.sub(_ranges(map(int, indices)), paths[0], count=1) if indices else paths[0]


def _ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as ranges.

    >>> _ranges([0, 1, 2, 5])
    '0-2,5'
    """
    runs: list[list[int]] = []
    for one in sorted(numbers):
        if runs and runs[-1][-1] + 1 == one:
            runs[-1].append(one)
        else:
            runs.append([one])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
