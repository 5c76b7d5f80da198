"""Results of several processes as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from amanda.errors import AmandaError
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
        """What `to_dict` gave, also in another process; raises ValueError for another schema or version."""


def check_schema(found: Mapping[str, Any], name: str, version: int) -> None:
    """Raise ValueError unless a file's content is of this schema and version."""
    schema = (found.get("schema"), found.get("version")) if isinstance(found, Mapping) else found
    if schema != (f"amanda.{name}", version):
        raise ValueError(f"schema and version are {schema}, not amanda.{name} and {version}")


def can_merge(result: object) -> bool:
    """Whether results like this one become one result, and not rows side by side."""
    columns = result.columns if isinstance(result, Result) else ()
    return isinstance(result, Mergeable) or any(column.merge for column in columns)


def merge(results: Mapping[str, Result], missing: Sequence[str] = ()) -> Result:
    """One result of several of the same tool, by what each is of: "rank0", "rank1".

    missing: what should have left a result and did not, which the result then says.
    By the result's own `merged`, else by what its columns say of themselves (`Column.merge`), else row by
    row as `by_rank` does.  Raises AmandaError where there is none, or they are of several tools.
    """
    _check(results)
    merged: Any
    first, *others = results.values()
    if not others:
        merged = copy(first)
    elif isinstance(first, Mergeable) and all(type(other) is type(first) for other in others):
        merged = cast(Any, first).merged(*others)
    elif can_merge(first):
        merged = _by_columns(results)
    else:
        merged = by_rank(results)
    told = told_apart({name: one.remarks for name, one in results.items()})
    if others or missing:
        told.append(f"Of {_listed(results)}{' together' if others else ''}.")
    if missing:
        told.append(f"There is no result of {_listed(missing)}.")
    merged.remarks = told
    return cast(Result, merged)


def by_rank(results: Mapping[str, Result]) -> Table:
    """The rows of several results of the same tool, with a first column `rank` that says whose each is.

    Raises AmandaError where there is none, or they are of several tools.
    """
    _check(results)
    first = next(iter(results.values()))
    rows = [(_rank(name), *row) for name, one in results.items() for row in one.rows()]
    columns = [Column("rank", number=True), *first.columns]
    notes = told_apart({name: one.notes() for name, one in results.items()})
    return Table("ranks", 1, columns, rows, f"{first.title or first.name} by rank", notes, {"of": first.name})


def told_apart(sentences: Mapping[str, Sequence[str]]) -> list[str]:
    """What all say, once; before what some say, who says it."""
    told: dict[str, list[str]] = {}
    for name, each in sentences.items():
        for sentence in each:
            told.setdefault(sentence, []).append(name)
    return [
        sentence if len(names) == len(sentences) else f"{', '.join(names)}: {sentence}"
        for sentence, names in told.items()
    ]


_WAYS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "sum": sum, "min": min, "max": max, "mean": lambda values: sum(values) / len(values),
}  # fmt: skip


def _by_columns(results: Mapping[str, Result]) -> Table:
    first = next(iter(results.values()))
    columns = first.columns
    keys = [i for i, column in enumerate(columns) if not column.merge]
    groups: dict[str, list[Sequence[Any]]] = {}
    for row in (row for one in results.values() for row in one.rows()):
        groups.setdefault(repr([row[i] for i in keys]), []).append(row)
    rows = [
        [_merged(column, [row[i] for row in rows]) for i, column in enumerate(columns)]
        for rows in groups.values()
    ]
    notes = told_apart({name: one.notes() for name, one in results.items()})
    return Table(first.name, first.version, columns, rows, first.title, notes)


def _merged(column: Column, values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    return _WAYS[column.merge](known) if column.merge and known else values[0]


def _check(results: Mapping[str, Result]) -> None:
    if not results:
        raise AmandaError("there is no result to be merged")
    kinds = {(one.name, one.version) for one in results.values()}
    if len(kinds) > 1:
        told = ", ".join(f"{name} has {one.name} {one.version}" for name, one in results.items())
        raise AmandaError(f"results of one tool are merged: {told}")


def _rank(name: str) -> int | str:
    number = name.removeprefix("rank")
    return int(number) if number.isdecimal() else name


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
