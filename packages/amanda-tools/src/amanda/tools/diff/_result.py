"""Result of a comparison of two runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from typing import Any, ClassVar, get_args

from amanda.errors import AmandaError
from amanda.tools.diff._comparison import Comparison
from amanda.tools.diff._plot import error_plot
from amanda.tools.diff._sentences import growth, growth_lines, sentence
from amanda.tools.dump import Op
from amanda.tools.results import Column, Result, Table, shortened
from amanda.tools.select import Phase

_short = partial(shortened, width=36)


class DiffResult(Result):
    """Comparisons in the order of execution of run a; true if an op diverges.

    only_a, only_b: ops of one run only.  modules: paths of the compared modules; empty if ops were compared.
    told: sentences on how the runs were made, such as compiled callables that ran op by op.  remaining:
    comparison of a with b after `bisect`; None without one.
    """

    name: ClassVar[str] = "diff"
    columns: ClassVar[Sequence[Column]] = (
        Column("phase"), Column("type"), Column("module", show=_short), Column("source", show=_short),
        Column("in b", show=_short), Column("execution", number=True),
        Column("relative error", show="{:.3g}".format, number=True),
        Column("cosine", show="{:.6f}".format, number=True),
        Column("largest", show="{:.3g}".format, number=True),
        Column("tolerance", show="{:g}".format, number=True), Column("verdict"),
    )  # fmt: skip

    def __init__(
        self,
        a: str,
        b: str,
        comparisons: Sequence[Comparison],
        only_a: Sequence[Op] = (),
        only_b: Sequence[Op] = (),
        modules: Sequence[str] = (),
        told: Sequence[str] = (),
        remaining: DiffResult | None = None,
    ) -> None:
        self.a, self.b, self.told, self.remaining = a, b, tuple(told), remaining
        self.title = "\n".join([f"a: {a}; b: {b}", *(f"{one}." for one in told)])
        self.comparisons = tuple(comparisons)
        self.only_a, self.only_b, self.modules = tuple(only_a), tuple(only_b), tuple(modules)

    def __bool__(self) -> bool:
        return self.first is not None

    def fail(self, ops: Sequence[int], op: int, failure: str) -> None:
        """Record that b fails at an op; raise AmandaError if a lacks it.  ops: op of b by comparison."""
        if op not in ops:
            raise AmandaError(f"b has {failure}, at an op that a does not have")
        self.comparisons = tuple(
            replace(one, relative=math.inf, largest=math.inf, failure=failure) if found == op else one
            for one, found in zip(self.comparisons, ops, strict=True)
        )

    @property
    def sentence(self) -> str:
        """The first divergence: op, error, expected error, inputs, and the result of `bisect`."""
        return sentence(self)

    @property
    def growth(self) -> Sequence[Comparison]:
        """The first op that diverges, later ops with twice the error shown before, and the last op."""
        return growth(self.comparisons)

    @property
    def first(self) -> Comparison | None:
        """The first op that diverges, in the order of execution."""
        return self._first()

    @property
    def first_forward(self) -> Comparison | None:
        """The first op of the forward pass that diverges."""
        return self._first("forward")

    @property
    def first_backward(self) -> Comparison | None:
        """The first op of the backward pass that diverges."""
        return self._first("backward")

    @property
    def hidden(self) -> Comparison | None:
        """The first op with an error over its own tolerance, but within one that earlier ops raised."""
        return next((one for one in self.comparisons if one.by_type < one.relative <= one.tolerance), None)

    @property
    def first_difference(self) -> Comparison | None:
        """The first op with any difference, even of one bit."""
        return next((one for one in self.comparisons if one.relative), None)

    def _first(self, *phases: str) -> Comparison | None:
        chosen = (one for one in self.comparisons if not phases or one.phase in phases)
        return next((one for one in chosen if one.diverges), None)

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each comparison."""
        return [
            (one.phase, one.type, one.module, one.source, _in_b(one), one.execution, one.relative,
             one.cosine, one.largest, one.tolerance, one.verdict)
            for one in self.comparisons
        ]  # fmt: skip

    def around(self, before: int = 8, after: int = 12) -> DiffResult:
        """Return a result with only the rows around the first divergence, or the last rows without one."""
        first = self.first or self.first_difference
        at = self.comparisons.index(first) if first else len(self.comparisons)
        chosen, told = self.comparisons[max(0, at - before) : at + after], (self.modules, self.told)
        return DiffResult(self.a, self.b, chosen, self.only_a, self.only_b, *told, self.remaining)

    def __str__(self) -> str:
        head = [f"{self.sentence} (a: {self.a}; b: {self.b}).", *(f"{one}." for one in self.told)]
        table = self.around()._table_alone()
        return "\n".join([*head, *growth_lines(self.comparisons), str(table).lstrip("\n"), *self.notes()])

    def _table_alone(self) -> Table:
        return Table(self.name, self.version, self.columns, self.rows(), "")

    def notes(self) -> Sequence[str]:
        """Return sentences on the divergences, and counts of the comparisons."""
        notes = [
            f"First divergence, {phase}: {self.comparisons[row]}"
            for phase, row in self._positions().items()
            if row is not None
        ]
        if not notes:
            worst = max((one.relative for one in self.comparisons), default=0.0)
            found = "No divergence" if self.hidden is None else "Nothing beyond the tolerance of ops before"
            notes.append(f"{found}; the largest relative error is {worst:.3g}.")
        if self.hidden is not None:
            notes.append(
                f"First difference beyond the tolerance of its own element types ({self.hidden.by_type:g}), "
                f"which less precise ops before have raised: {self.hidden}"
            )
        first = self.first_difference
        if first is not None and first is not self.first:
            notes.append(f"First difference of any size: {first}")
        notes.append(self._counts())
        if not all(one.exact for one in self.comparisons):
            notes.append("Some were compared by statistics and samples alone: their tensors were not kept.")
        return notes

    def _counts(self) -> str:
        counts = {"same": 0, "close": 0, "different": 0}
        for one in self.comparisons:
            counts[one.verdict] += 1
        told = ", ".join(f"{count:,} {verdict}" for verdict, count in counts.items())
        what = "outputs of modules and gradients of weights" if self.modules else "executions of ops"
        alone = "" if self.modules else f"; {len(self.only_a):,} ops in a alone, {len(self.only_b):,} in b"
        return f"{len(self.comparisons):,} {what} compared: {told}{alone}."

    def facts(self) -> Mapping[str, Any]:
        """Return the runs, the first divergences, and ops of one run only, as plain values."""
        return {
            "a": self.a, "b": self.b, "sentence": self.sentence, "different": bool(self),
            "first": self._positions(), "growth": [self.comparisons.index(one) for one in self.growth],
            "remaining": None if self.remaining is None else self.remaining.sentence,
            "modules": list(self.modules), "told": list(self.told),
            "hidden": None if self.hidden is None else self.comparisons.index(self.hidden),
            "only_a": [[op.phase, op.type, op.module, op.source] for op in self.only_a],
            "only_b": [[op.phase, op.type, op.module, op.source] for op in self.only_b],
        }  # fmt: skip

    def _positions(self) -> dict[str, int | None]:
        """Return the row of the first divergence of each phase."""
        found: dict[str, int | None] = dict.fromkeys(get_args(Phase))
        for row, one in reversed(list(enumerate(self.comparisons))):
            if one.diverges:
                found[one.phase] = row
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return schema, version, facts and one object for each row; infinities and NaN as strings."""
        found = super().to_dict()
        for row in found["rows"]:
            for name, value in row.items():
                if isinstance(value, float) and not math.isfinite(value):
                    row[name] = str(value)
        return found

    def _repr_html_(self) -> str:
        story = escape("\n".join([self.sentence, self.title, *growth_lines(self.comparisons), *self.notes()]))
        plot = error_plot(self.comparisons, self._positions().values())
        return f"<pre>{story}</pre>{plot}{self._table_alone()._repr_html_()}"


def _in_b(one: Comparison) -> str:
    """Return the other run's module, and type where it is another; empty where both are the same.

    An op that one run lacks has its type, and the name of the run that has the op.
    """
    if one.only:
        return f"{one.type} (b alone)" if one.only == "b" else "(a alone)"
    module = one.other_module if one.other_module != one.module else ""
    return " ".join(filter(None, (one.other_type if one.other_type != one.type else "", module)))
