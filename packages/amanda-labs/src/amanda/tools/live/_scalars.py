"""Named numbers from a result: totals of some tools, and columns of the rows of any other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

from amanda.errors import did_you_mean
from amanda.tools.live._writers import LiveError
from amanda.tools.results import Column, Result

# What somebody who watches a training run asks of a step; other columns are logged on request.
_OUTPUT_COLUMNS, _OTHER_COLUMNS = ("mean", "std"), ("L2",)
"""Columns of statistics that are logged: of outputs, and of weights and gradients."""
_TOTALS: Mapping[str, Sequence[str]] = {"flops": ("FLOPs", "MACs"), "profile": ("self ms", "allocated")}
"""Columns of which only the sums are logged, of all rows and of each phase."""

RUN_RESULTS = frozenset({"nan", "sentinel"})
"""Names of results that count over the whole run, since their tools watch every step or choose steps."""

_NO_KEYS = frozenset({"phase", "type", "module", "source", "dtype"})
"""Columns of text that do not name a row beside its type and module."""


def scalars_of(result: Any, columns: Sequence[str] | None = None) -> dict[str, float]:
    """Return the numbers of a result by name, such as {"stats/encoder.linear/output 0 mean": 0.1}.

    Of `flops` and `profile` these are totals, of `nan` and `sentinel` counts, of other results the columns of
    numbers, with a name for each row by module, type and other texts.  A result with a method `scalars`
    returns its numbers by name itself.
    columns: names of columns of the rows to return instead.
    Raises LiveError for a result without rows, and for a column that it lacks or that has no numbers.
    """
    if columns is None and callable(own := getattr(result, "scalars", None)):
        return {f"{_prefix(result)}/{name}": float(value) for name, value in own().items()}
    if not isinstance(result, Result):
        raise LiveError(
            f"a {type(result).__name__} has no rows to log; a result with a method `scalars`, which returns "
            "numbers by name, can be logged"
        )
    if columns is None and result.name in RUN_RESULTS:
        numbers = _nan_counts(result) if result.name == "nan" else _sentinel_counts(result)
    elif columns is None and result.name in _TOTALS:
        numbers = dict(_totals(result, _TOTALS[result.name]))
    else:
        numbers = _row_numbers(result, columns)
    return {f"{result.name}/{name}": value for name, value in numbers.items()}


def _prefix(result: Any) -> str:
    """Return the name of a result; of one without a name that of its class."""
    return str(getattr(result, "name", type(result).__name__))


def _nan_counts(result: Any) -> dict[str, float]:
    """Return how often NaN began at an op, input or parameter, and how many executions passed it on."""
    return {"findings": sum(row.times for row in result), "passed on": result.passed_on}


def _sentinel_counts(result: Any) -> dict[str, float]:
    """Return the number of alarms of each kind, and of watched steps."""
    kinds = Counter(alarm.kind for alarm in result.alarms)
    by_kind = {kind: kinds[kind] for kind in ("corruption", "nan", "spike", "ranks")}
    return {"alarms": kinds.total(), **by_kind, "watched steps": result.counts.watched}


def _totals(result: Result, names: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Yield the sums of columns over all rows, then over those of each phase, if rows have one."""
    rows, positions = result.rows(), _positions(result, [*names, "phase"])
    keys = [row[positions["phase"]] if "phase" in positions else None for row in rows]
    for name in names:
        position = positions[name]
        yield name, float(sum(row[position] or 0 for row in rows))
        for value in dict.fromkeys(key for key in keys if key is not None):
            numbers = [row[position] for row, key in zip(rows, keys, strict=True) if key == value]
            yield f"{name} {value}", float(sum(number or 0 for number in numbers))


def _row_numbers(result: Result, columns: Sequence[str] | None) -> dict[str, float]:
    """Return the numbers of columns for each row; equal names of rows get a number, from the second on."""
    positions = _positions(result, _checked_columns(result, columns))
    numbers, seen = dict[str, float](), Counter[str]()
    for row in result.rows():
        name = _row_name(result.columns, row)
        if name is None:
            continue
        seen[name] += 1
        place, _, rest = name.partition("/")
        place += f"-{seen[name]}" * (seen[name] > 1)
        for column, position in positions.items():
            if columns is None and result.name == "stats" and column not in _stats_columns(rest):
                continue
            value = row[position]
            # None stands for a number that there is not, such as the mean of no elements.
            if isinstance(value, Real) and not isinstance(value, bool):
                numbers[f"{place}/{rest} {column}" if rest else f"{place}/{column}"] = float(value)
    return numbers


def _stats_columns(tensor: str) -> Sequence[str]:
    """Return the columns of statistics that are logged of a tensor by default."""
    return _OUTPUT_COLUMNS if tensor.startswith("output") else _OTHER_COLUMNS


def _row_name(columns: Sequence[Column], row: Sequence[Any]) -> str | None:
    """Return module and type of a row, a slash, its phase and other texts; None for a tensor of integers."""
    texts = {column.name: value for column, value in zip(columns, row, strict=True) if isinstance(value, str)}
    # Indices and masks have no statistics that somebody would watch.
    if texts.get("dtype", "float").startswith(("int", "uint", "bool")):
        return None
    module, kind, phase = (texts.get(name, "") for name in ("module", "type", "phase"))
    place = ".".join(filter(None, [module.replace("/", "."), kind]))
    is_implied = phase in ("", "forward") or kind.endswith("_backward")
    others = [text for name, text in texts.items() if name not in _NO_KEYS and text]
    return f"{place or 'all'}/{' '.join([*([] if is_implied else [phase]), *others])}"


def _positions(result: Result, names: Sequence[str]) -> dict[str, int]:
    """Return the positions of the columns with these names, in the order of the names."""
    positions = {column.name: i for i, column in enumerate(result.columns)}
    return {name: positions[name] for name in names if name in positions}


def _checked_columns(result: Result, names: Sequence[str] | None) -> Sequence[str]:
    """Return names of columns, by default those that are logged of the result.

    Raises LiveError for a name that no column of numbers has.
    """
    numeric = [column.name for column in result.columns if column.number or column.total]
    for name in names or ():
        if name not in numeric:
            raise LiveError(f"{result.name} has no column of numbers {name!r}; {did_you_mean(name, numeric)}")
    if names is not None:
        return names
    return [column.name for column in result.columns if column.name in numeric and column.shown]
