"""Results of several processes as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from amanda.errors import AmandaError
from amanda.options import Name, checked
from amanda.tools.results._files import in_words
from amanda.tools.results._result import Column, Result
from amanda.tools.results._table import Table

ResultT = TypeVar("ResultT")


@runtime_checkable
class Mergeable(Protocol):
    """A result that can be put together with those of other runs, ranks or processes."""

    def merged(self: ResultT, *others: ResultT) -> ResultT:
        """This and the others as one."""

    @classmethod
    def from_dict(cls: type[ResultT], found: Mapping[str, Any]) -> ResultT:
        """Return the result that `to_dict` described; raise ValueError for other schemas, newer versions."""


def can_merge(result: object) -> bool:
    """Return True if results of this class merge into one result, instead of rows side by side."""
    columns = result.columns if isinstance(result, Result) else ()
    return isinstance(result, Mergeable) or any(column.merge for column in columns)


@checked
def merge(results: Mapping[str, Result], missing: Sequence[Name] = ()) -> Result:
    """One result of several of the same tool, by what each is of: "rank0", "rank1".

    missing: what should have left a result and did not, which the result then says.
    By the result's own `merged`, else by what its columns say of themselves (`Column.merge`), else row by
    row as `by_rank` does.  What is merged can be merged again, with the same numbers as in one step.
    Raises AmandaError where there is none, or they are of several tools or have other columns.
    """
    _check(results)
    try:
        merged = _together(results)
    except (TypeError, ValueError, LookupError, AttributeError) as error:  # of values that somebody wrote
        raise AmandaError(
            f"results of {_listed(results)} cannot be put together: {in_words(error)}"
        ) from error
    told = told_apart({name: one.remarks for name, one in results.items()})
    if len(results) > 1 or missing:
        told.append(f"Of {_listed(results)}{' together' if len(results) > 1 else ''}.")
    if missing:
        told.append(f"There is no result of {_listed(missing)}.")
    merged.remarks = told
    return merged


def _together(results: Mapping[str, Result]) -> Result:
    first, *others = results.values()
    if not others:
        return copy(first)
    if isinstance(first, Mergeable) and all(type(other) is type(first) for other in others):
        return cast(Result, cast(Any, first).merged(*others))
    return _by_columns(results) if any(column.merge for column in first.columns) else by_rank(results)


def by_rank(results: Mapping[str, Result]) -> Table:
    """The rows of several results of the same tool, with a first column `rank` that says whose each is.

    Those of tables that have it already are then "host0.rank1".  Raises AmandaError where there is none, or
    they are of several tools or have other columns.
    """
    _check(results)
    first = next(iter(results.values()))
    notes = told_apart({name: one.notes() for name, one in results.items()})
    cells = [row for one in results.values() for row in _weighted(one)]
    facts = _facts(first.columns, cells, _of(first) or first.name)
    if _of(first):
        ranked = [(_within(name, row[0]), *row[1:]) for name, one in results.items() for row in one.rows()]
        return Table(_RANKS, 1, first.columns, ranked, first.title, notes, facts)
    rows = [(_rank(name), *row) for name, one in results.items() for row in one.rows()]
    columns = [Column("rank", number=True), *first.columns]
    return Table(_RANKS, 1, columns, rows, f"{first.title or first.name} by rank", notes, facts)


def told_apart(sentences: Mapping[str, Sequence[str]]) -> list[str]:
    """Return sentences: those of all results once, and those of some results with the results' names."""
    told: dict[str, list[str]] = {}
    for name, each in sentences.items():
        for sentence in each:
            told.setdefault(sentence, []).append(name)
    return [
        sentence if len(names) == len(sentences) else f"{', '.join(names)}: {sentence}"
        for sentence, names in told.items()
    ]


_RANKS = "ranks"
_VALUES = "values_of_means"
"""The fact that says by column of how many values the mean in each row is, for when it is merged again."""

_WAYS: Mapping[str, Callable[[Sequence[Any]], Any]] = {"sum": sum, "min": min, "max": max}

_Cell = tuple[Any, int]
"""A value, and how many values of single results it stands for."""


def _by_columns(results: Mapping[str, Result]) -> Table:
    first = next(iter(results.values()))
    columns = first.columns
    keys = [i for i, column in enumerate(columns) if not column.merge]
    groups: dict[str, list[Sequence[_Cell]]] = {}
    for row in (row for one in results.values() for row in _weighted(one)):
        groups.setdefault(repr([row[i] for i in keys]), []).append(row)
    merged = [
        [_merged(column, [row[i] for row in rows]) for i, column in enumerate(columns)]
        for rows in groups.values()
    ]
    rows = [[value for value, _ in row] for row in merged]
    notes = told_apart({name: one.notes() for name, one in results.items()})
    facts = _facts(columns, merged, _of(first))
    return Table(first.name, first.version, columns, rows, first.title, notes, facts)


def _facts(columns: Sequence[Column], rows: Sequence[Sequence[_Cell]], of: str) -> dict[str, Any]:
    means = {
        column.name: [row[i][1] for row in rows] for i, column in enumerate(columns) if column.merge == "mean"
    }
    return {**({"of": of} if of else {}), **({_VALUES: means} if means else {})}


def _weighted(result: Result) -> list[list[_Cell]]:
    counts = result.facts().get(_VALUES, {}) if isinstance(result, Table) else {}
    return [
        [
            (value, counts[column.name][i] if column.name in counts else int(value is not None))
            for column, value in zip(result.columns, row, strict=True)
        ]
        for i, row in enumerate(result.rows())
    ]


def _merged(column: Column, cells: Sequence[_Cell]) -> _Cell:
    known, count = [value for value, _ in cells if value is not None], sum(count for _, count in cells)
    if not column.merge or not known:
        return cells[0]
    if column.merge == "mean":
        return sum(value * weight for value, weight in cells if weight) / count, count
    return _WAYS[column.merge](known), count


def _check(results: Mapping[str, Result]) -> None:
    """Raise AmandaError unless all are of one tool and have the same columns, in the same order."""
    if not results:
        raise AmandaError("there is no result to be merged")
    kinds = {
        name: f"{_of(one)} by rank" if _of(one) else f"{one.name} {one.version}"
        for name, one in results.items()
    }
    if len(set(kinds.values())) > 1:
        told = ", ".join(f"{name} has {kind}" for name, kind in kinds.items())
        raise AmandaError(f"results of one tool are merged: {told}")
    (name, first), *others = results.items()
    for another, one in others:
        if _columns(one) != _columns(first):
            raise AmandaError(
                f"results with the same columns, in the same order, are merged: {name} has "
                f"{', '.join(_columns(first))}; {another} has {', '.join(_columns(one))}"
            )


def _columns(result: Result) -> list[str]:
    """Columns by what makes their values alike; how they are shown is each result's own."""
    return [f"{column.name} ({column.merge})" if column.merge else column.name for column in result.columns]


def _of(result: Result) -> str:
    """The tool of whose results a table by rank is; "" for what is none."""
    return str(result.facts().get("of", "")) if isinstance(result, Table) and result.name == _RANKS else ""


def _within(name: str, rank: int | str) -> str:
    return f"{name}.rank{rank}" if isinstance(rank, int) else f"{name}.{rank}"


def _rank(name: str) -> int | str:
    number = name.removeprefix("rank")
    return int(number) if number.isdecimal() else name


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
