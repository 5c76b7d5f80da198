"""Named numbers from a result: totals of some tools, and columns of the rows of any other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

from amanda.errors import did_you_mean
from amanda.tools.live._writers import LiveError
from amanda.tools.results import Result

RUN_RESULTS = frozenset({"nan", "sentinel"})
"""Names of results that count over the whole run, since their tools watch every step or choose steps."""

_NO_KEYS = frozenset({"phase", "type", "module", "source", "dtype"})
"""Columns of text that do not name a row beside its type and module."""


def scalars_of(result: Any, columns: Sequence[str] | None = None) -> dict[str, float]:
    """Return the numbers of a result by name, such as {"stats/encoder.linear/output 0 mean": 0.1}.

    Of `stats` these are mean and standard deviation of outputs, L2 norms of weights and gradients, and of all
    of them quantiles, if others than the default ones were asked for; of `flops` and `profile` totals; of
    `nan` and `sentinel` counts; of other results the columns of numbers, with a name for each row by module,
    type and other texts.  A result with a method `scalars` returns its numbers by name itself.

    Args:
        result: Result of a tool.
        columns: Names of columns of the rows to return instead.

    Raises:
        LiveError: For a result without rows, and for a column that it lacks or that has no numbers.
    """
    name = str(getattr(result, "name", type(result).__name__))
    if columns is None and callable(scalars := getattr(result, "scalars", None)):
        numbers: Mapping[str, float] = scalars()
    elif not isinstance(result, Result):
        raise LiveError(
            f"a {type(result).__name__} has no rows to log; a result with a method `scalars`, which returns "
            "numbers by name, can be logged"
        )
    elif columns is None and name in _DEFAULTS:
        numbers = dict(_DEFAULTS[name](result))
    else:
        numbers = _row_numbers(result, _checked_columns(result, columns))
    return {f"{name}/{label}": float(value) for label, value in numbers.items()}


def _stats_numbers(result: Any) -> Iterator[tuple[str, float]]:
    """Yield mean and standard deviation of each output, L2 of weights and gradients; quantiles of all.

    Tensors of integers, and without elements, are left out; quantiles where a sketch has them.
    """
    names = _RowNames()
    # Not by rows, whose default quantiles take longer than all else.
    for entry in result.measured:
        # Indices and masks have no statistics that somebody would watch.
        if entry.is_integer or not entry.statistics.count:
            continue
        name = names.unique(entry.module, entry.type, entry.phase, [entry.tensor])
        if entry.tensor.startswith("output"):
            yield f"{name} mean", entry.statistics.mean
            yield f"{name} std", entry.statistics.std
        else:
            yield f"{name} L2", entry.statistics.l2
        if entry.sketch is not None:
            yield from ((f"{name} q{q:g}", entry.quantile(q)) for q in result.chosen_quantiles)


def _nan(result: Any) -> Mapping[str, float]:
    """Return how often NaN began at an op, input or parameter, and how many executions passed it on."""
    return {"findings": sum(row.times for row in result), "passed on": result.passed_on}


def _sentinel(result: Any) -> Mapping[str, float]:
    """Return the number of alarms, of those of each kind, and of watched steps."""
    kinds = Counter(alarm.kind for alarm in result.alarms)
    by_kind = {kind: kinds[kind] for kind in ("corruption", "nan", "spike", "ranks")}
    return {"alarms": kinds.total(), **by_kind, "watched steps": result.counts.watched}


def _column_totals(names: Sequence[str], result: Result) -> Iterator[tuple[str, float]]:
    """Yield the sum of each column over all rows, then over those of each phase, if rows have one."""
    rows, position_by_name = result.rows(), _position_by_name(result, [*names, "phase"])
    phases = [row[position_by_name["phase"]] if "phase" in position_by_name else None for row in rows]
    for name in names:
        numbers = [row[position_by_name[name]] or 0 for row in rows]
        yield name, sum(numbers)
        for phase in dict.fromkeys(filter(None, phases)):
            phase_numbers = (
                number for number, row_phase in zip(numbers, phases, strict=True) if row_phase == phase
            )
            yield f"{name} {phase}", sum(phase_numbers)


# What somebody who watches a training run asks of a step; the rest is logged on request.
_DEFAULTS: Mapping[str, Callable[[Any], Any]] = {
    "stats": _stats_numbers,
    "flops": partial(_column_totals, ("FLOPs", "MACs")),
    "profile": partial(_column_totals, ("self ms", "allocated")),
    "nan": _nan,
    "sentinel": _sentinel,
}
"""Functions that return the numbers of a result, by its name."""


class _RowNames:
    """Names of the rows of a result, each once."""

    def __init__(self) -> None:
        self._count_by_name = Counter[str]()

    def unique(self, module: str, kind: str, phase: str, others: Sequence[str]) -> str:
        """Return "module.type/others"; the second row with a name has a "-2" behind its type.

        The phase is among the others unless it is forward, or the type tells it.
        """
        place = ".".join(filter(None, [module.replace("/", "."), kind])) or "all"
        is_phase_implied = phase in ("", "forward") or kind.endswith("_backward")
        rest = " ".join(others if is_phase_implied else [phase, *others])
        self._count_by_name[f"{place}/{rest}"] += 1
        count = self._count_by_name[f"{place}/{rest}"]
        suffix = f"-{count}" if count > 1 else ""
        return f"{place}{suffix}/{rest}"


def _row_numbers(result: Result, columns: Sequence[str]) -> dict[str, float]:
    """Return the numbers of some columns of each row, by the row's texts and the column's name.

    Values that are no numbers, and truth values, are left out, as are columns that the result lacks.
    """
    position_by_name, numbers, names = _position_by_name(result, columns), dict[str, float](), _RowNames()
    for row in result.rows():
        pairs = zip(result.columns, row, strict=True)
        texts = {column.name: value for column, value in pairs if isinstance(value, str)}
        module, kind, phase = (texts.get(name, "") for name in ("module", "type", "phase"))
        others = [text for name, text in texts.items() if name not in _NO_KEYS and text]
        name = names.unique(module, kind, phase, others)
        for column, position in position_by_name.items():
            value = row[position]
            # None stands for a number that there is not, such as the mean of no elements.
            if isinstance(value, Real) and not isinstance(value, bool):
                separator = "" if name.endswith("/") else " "
                numbers[f"{name}{separator}{column}"] = float(value)
    return numbers


def _position_by_name(result: Result, names: Sequence[str]) -> dict[str, int]:
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
