"""Result of a comparison: each op of two runs, the sentences on them, and a plot of the errors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from html import escape
from typing import Any, ClassVar, get_args

from amanda.errors import AmandaError
from amanda.tools.diff._errors import TOLERANCES, Comparison
from amanda.tools.dump import Entry, Op
from amanda.tools.kit import shape_text
from amanda.tools.results import Column, Result, Table, folded
from amanda.tools.select import Phase

_STEP = 2.0
"""How many times the error before it an error is that the growth shows."""
_SHOWN = 8
_READ = 2
"""Tensors that an op read that are named."""


def _error_text(comparison: Comparison) -> str:
    if comparison.expected is None:
        return f"{comparison.relative:.2g} (allowed {comparison.tolerance:.2g})"
    return f"{comparison.relative:.2g} (expected {comparison.expected:.2g})"


def _remaining_text(first: Comparison, remaining: DiffResult) -> str:
    """Return what remains of the difference, in words, if the op, or its reader, gives a's value in b."""
    replacement = f"with a's value in {'the place of what reads it' if first.only else 'its place'}"
    if remaining.first is None:
        largest_error = max((comparison.relative for comparison in remaining.comparisons), default=0.0)
        remainder = "not one bit of it" if not largest_error else f"no more than {largest_error:.2g}"
        return f"{replacement}, {remainder} remains"
    next_op = remaining.first
    if next_op.place == first.place and next_op.dtypes[0] != next_op.dtypes[1]:
        return f"{replacement}, rounded to {next_op.dtypes[1]}, {next_op.relative:.2g} remains there"
    return f"{replacement}, the runs next differ at {next_op.place}: {next_op.relative:.2g}"


def reading_text(read_tensors: Iterable[tuple[Entry, float, bool]], op: Op) -> str:
    """Return a text on the inputs of an op of run a: those that differ, or else the first ones."""
    # read_tensors: of run a, with their relative errors, and whether they agree.
    parameters, all_tensors = dict(op.parameters), list(read_tensors)
    differing_tensors = [(entry, relative, agrees) for entry, relative, agrees in all_tensors if not agrees]
    texts = []
    for entry, relative, agrees in (differing_tensors or all_tensors)[:_READ]:
        path = parameters.get(entry.position) if entry.role == "input" else None
        name = f"{entry.role} {entry.position}" if path is None else f"parameter {path}"
        statistics = entry.summary.statistics
        range_text = f" from {statistics.least:.3g} to {statistics.most:.3g}" if statistics.count else ""
        nonfinite_count = statistics.elements - statistics.count
        texts.append(
            f"{name}{'' if agrees else f' by {relative:.2g}'}: {entry.dtype}"
            f"{shape_text(entry.shape, entry.batches)}{range_text}"
            f"{f' with {nonfinite_count:,} NaN or Inf' if nonfinite_count else ''}"
        )
    return ", ".join(texts)


class DiffResult(Result):
    """Comparisons in the order of execution of run a; true if an op diverges.

    only_a, only_b: ops of one run only.  modules: paths of the compared modules; empty if ops were compared.
    told: sentences on how the runs were made, such as compiled callables that ran op by op.  remaining:
    comparison of a with b after `bisect`; None without one.
    """

    name: ClassVar[str] = "diff"
    columns: ClassVar[Sequence[Column]] = (
        *map(Column, ("phase", "type", "module", "source")), Column("in b"),
        Column("execution", number=True, priority=-1),
        Column("relative error", show="{:.3g}".format, number=True, priority=3),
        Column("cosine", show="{:.6f}".format, number=True),
        Column("largest", show="{:.3g}".format, number=True),
        Column("tolerance", show="{:g}".format, number=True, priority=1), Column("verdict", priority=4),
    )  # fmt: skip

    def __init__(
        self, a: str, b: str, comparisons: Sequence[Comparison], only_a: Sequence[Op] = (),
        only_b: Sequence[Op] = (), modules: Sequence[str] = (), told: Sequence[str] = (),
        remaining: DiffResult | None = None,
    ) -> None:  # fmt: skip
        self.a, self.b, self.told, self.remaining = a, b, tuple(told), remaining
        self.title = "\n".join([f"a: {a}; b: {b}", *(f"{text}." for text in told)])
        self.comparisons = tuple(comparisons)
        self.only_a, self.only_b, self.modules = tuple(only_a), tuple(only_b), tuple(modules)

    def __bool__(self) -> bool:
        return self.first is not None

    def fail(self, ops: Sequence[int], op: int, failure: str) -> None:
        """Record that b fails at an op, with an infinite error; raise AmandaError if a lacks the op.

        Args:
            ops: Op of b for each comparison.
            op: Op of b that fails.
            failure: The failure in words.
        """
        if op not in ops:
            raise AmandaError(f"b has {failure}, at an op that a does not have")
        changed_fields: dict[str, Any] = {"relative": math.inf, "largest": math.inf, "failure": failure}
        rows = zip(self.comparisons, ops, strict=True)
        self.comparisons = tuple(replace(row, **changed_fields) if b_op == op else row for row, b_op in rows)

    @property
    def sentence(self) -> str:
        """The first divergence: op, errors, inputs, and the result of `bisect`; or the largest error."""
        first = self.first
        if first is None:
            worst = max(self.comparisons, key=lambda comparison: comparison.relative, default=None)
            if worst is None or not worst.relative:
                return f"No difference: all {len(self.comparisons):,} are the same to the last bit"
            bound = "tolerance" if worst.expected is None else "expected error"
            largest = f"{_error_text(worst)}, at {worst.place}"
            return f"No difference beyond the {bound}: relative error at most {largest}{self._warning()}"
        if first.failure:
            return f"b fails at {first.place}: {first.failure}"
        parts = [f"The runs first differ at {first.place}: relative error {_error_text(first)}"]
        if first.reason:
            parts.append(first.reason)
        if first.is_retyped:
            parts.append(f"it gives {first.dtypes[0]} in a and {first.dtypes[1]} in b")
        if first.read:
            agreement = {None: "were", True: "agree", False: "differ already"}[first.inputs]
            parts.append(f"its inputs {agreement} ({first.read})")
        if first.weight:
            parts.append(f"its weight differs by {first.weight:.2g}")
        if self.remaining is not None:
            parts.append(_remaining_text(first, self.remaining))
        return "; ".join(parts)

    headline = sentence

    def _warning(self) -> str:
        """Return a warning on a run a that is far from its control itself; "" without one."""
        comparisons = [comparison for comparison in self.comparisons if comparison.dtypes[0] in TOLERANCES]
        worst = max(comparisons, key=lambda comparison: comparison.expected or 0.0, default=None)
        if worst is None or (worst.expected or 0.0) <= TOLERANCES["bfloat16"]:
            return ""
        return f". Warning: a itself is off by {worst.expected:.0%} from its control, at {worst.place}"

    @property
    def growth(self) -> Sequence[Comparison]:
        """The first op that diverges, later ops with twice the error shown before, and the last op.

        At most nine; nothing without a divergence, and where run b fails.
        """
        if self.first is None or self.first.failure:
            return []
        steps = [self.first]
        for comparison in self.comparisons[self.comparisons.index(self.first) + 1 :]:
            if comparison.relative >= _STEP * steps[-1].relative and len(steps) < _SHOWN:
                steps.append(comparison)
        last = self.comparisons[-1]
        return steps if last is steps[-1] else [*steps, last]

    def _growth_lines(self) -> list[str]:
        """Return a line for each op of `growth`."""
        lines = [f"  {c.relative:9.2g}  {c.place}, execution {c.execution}" for c in self.growth]
        return ["How the error grows, up to the last op:", *lines] if lines else []

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
        hidden_comparisons = (c for c in self.comparisons if c.by_type < c.relative <= c.tolerance)
        return next(hidden_comparisons, None)

    @property
    def first_difference(self) -> Comparison | None:
        """The first op with any difference, even of one bit."""
        return next((comparison for comparison in self.comparisons if comparison.relative), None)

    def _first(self, *phases: str) -> Comparison | None:
        candidates = (c for c in self.comparisons if not phases or c.phase in phases)
        return next((comparison for comparison in candidates if comparison.diverges), None)

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each comparison."""
        return [
            (row.phase, row.type, row.module, row.source, _in_b(row), row.execution, row.relative,
             row.cosine, row.largest, row.tolerance, row.verdict)
            for row in self.comparisons
        ]  # fmt: skip

    def around(self, before: int = 8, after: int = 12) -> DiffResult:
        """Return a result with only the rows around the first divergence, or the last rows without one.

        Args:
            before: Rows ahead of the divergence.
            after: Rows behind it.
        """
        first = self.first or self.first_difference
        index = self.comparisons.index(first) if first else len(self.comparisons)
        rows_around = copy(self)
        rows_around.comparisons = self.comparisons[max(0, index - before) : index + after]
        return rows_around

    def __str__(self) -> str:
        """Return the sentence, the growth, the rows around the first divergence, and the notes."""
        head = [f"{self.sentence} (a: {self.a}; b: {self.b}).", *(f"{text}." for text in self.told)]
        above, below = ("\n".join(lines) for lines in ([*head, *self._growth_lines()], self.notes()))
        table = str(self.around(before=5, after=10)._table_alone()).lstrip("\n")
        return "\n".join([folded(above), table, folded(below)])

    def _table_alone(self) -> Table:
        return Table(self.name, self.version, self.columns, self.rows(), "")

    def notes(self) -> Sequence[str]:
        """Return sentences on divergences, on differences that tolerances hide, and counts of verdicts."""
        rows = self._positions().items()
        notes = [f"First divergence, {phase}: {self.comparisons[i]}" for phase, i in rows if i is not None]
        if not notes:
            worst = max((comparison.relative for comparison in self.comparisons), default=0.0)
            outcome = "No divergence" if self.hidden is None else "Nothing beyond the tolerance of ops before"
            notes.append(f"{outcome}; the largest relative error is {worst:.3g}.")
        if self.hidden is not None:
            notes.append(
                f"First difference beyond the tolerance of its own element types ({self.hidden.by_type:g}), "
                f"which less precise ops before have raised: {self.hidden}"
            )
        first = self.first_difference
        if first is not None and first is not self.first:
            notes.append(f"First difference of any size: {first}")
        notes.append(self._counts())
        if not all(comparison.exact for comparison in self.comparisons):
            notes.append("Some were compared by statistics and samples alone: their tensors were not kept.")
        return notes

    def _counts(self) -> str:
        """Return a sentence on how many comparisons are the same, close and different."""
        counts = Counter(comparison.verdict for comparison in self.comparisons)
        verdicts = ", ".join(f"{counts[verdict]:,} {verdict}" for verdict in ("same", "close", "different"))
        if self.modules:
            noun, unmatched = "outputs of modules and gradients of weights", ""
        else:
            noun = "executions of ops"
            unmatched = f"; {len(self.only_a):,} ops in a alone, {len(self.only_b):,} in b"
        return f"{len(self.comparisons):,} {noun} compared: {verdicts}{unmatched}."

    def _facts(self) -> Mapping[str, Any]:
        """Return the runs, the first divergences, and ops of one run only, as plain values."""
        return {
            "a": self.a, "b": self.b, "sentence": self.sentence, "different": bool(self),
            "first": self._positions(), "growth": [*map(self.comparisons.index, self.growth)],
            "remaining": None if self.remaining is None else self.remaining.sentence,
            "modules": list(self.modules), "told": list(self.told),
            "hidden": None if self.hidden is None else self.comparisons.index(self.hidden),
            "only_a": [[op.phase, op.type, op.module, op.source] for op in self.only_a],
            "only_b": [[op.phase, op.type, op.module, op.source] for op in self.only_b],
        }  # fmt: skip

    def _positions(self) -> dict[str, int | None]:
        """Return the row of the first divergence of each phase, None for a phase without one."""
        firsts = {phase: self._first(phase) for phase in get_args(Phase)}
        row_of = self.comparisons.index
        return {phase: None if first is None else row_of(first) for phase, first in firsts.items()}

    def _repr_html_(self) -> str:
        story = escape("\n".join([self.sentence, self.title, *self._growth_lines(), *self.notes()]))
        plot = error_plot(self.comparisons, self._positions().values())
        return f"<pre>{story}</pre>{plot}{self._table_alone()._repr_html_()}"


def _in_b(comparison: Comparison) -> str:
    """Return b's type and module where they differ from a's; for an op of one run alone, that run."""
    if comparison.only:
        return f"{comparison.type} (b alone)" if comparison.only == "b" else "(a alone)"
    type = comparison.other_type if comparison.other_type != comparison.type else ""
    module = comparison.other_module if comparison.other_module != comparison.module else ""
    return f"{type} {module}".strip()


_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 900, 260, 50, 30
_LOWEST = 1e-9
_COLOURS = {"forward": "#2563eb", "backward": "#d97706", "optimizer": "#059669", "construction": "#6b7280"}


def error_plot(comparisons: Sequence[Any], ringed: Collection[int | None]) -> str:
    """Draw relative errors on a logarithmic scale, one point for each comparison, as an SVG element."""
    # ringed: positions of points with a ring.  A dash marks the tolerance of each.
    if not comparisons:
        return ""
    x_step = (_WIDTH - _LEFT - 10) / max(len(comparisons) - 1, 1)
    points = [_point(comparison, _LEFT + i * x_step, i in ringed) for i, comparison in enumerate(comparisons)]
    lines = [
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{_y(10.0**n):.1f}" y2="{_y(10.0**n):.1f}" stroke="#8884"/>'
        f'<text x="{_LEFT - 6}" y="{_y(10.0**n) + 4:.1f}" text-anchor="end">1e{n}</text>'
        for n in range(-9, 2, 2)
    ]
    legend = "".join(f'<tspan fill="{colour}">● {phase}</tspan> ' for phase, colour in _COLOURS.items())
    label = f'<text x="{_LEFT}" y="{_HEIGHT - 6}">{legend} relative error in the order of execution</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" '
        'aria-label="relative error in the order of execution" font-size="12" fill="currentColor" '
        f'style="font-family:sans-serif">{"".join(lines)}{label}{"".join(points)}</svg>'
    )


def _point(comparison: Any, x: float, is_ringed: bool) -> str:
    """Draw the point of a comparison at x with a dash at its tolerance, and a ring if asked, in SVG."""
    y, colour = _y(comparison.relative), _COLOURS[comparison.phase]
    place = f"{comparison.type} {comparison.module} {comparison.source}"
    label = escape(f"{place}: {comparison.relative:.3g}, {comparison.verdict}")
    ring = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="none" stroke="#dc2626" stroke-width="2"/>'
    y_of_tolerance = _y(comparison.tolerance)
    dash = f'<path d="M{x - 2:.1f} {y_of_tolerance:.1f}h4" stroke="#8888"/>'
    point = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{label}</title></circle>'
    return dash + (ring if is_ringed else "") + point


def _y(error: float) -> float:
    """Return the height of an error; those below 1e-9 lie at the bottom, those above 10 at the top."""
    exponent = math.log10(min(max(error, _LOWEST), 10.0))
    return 10 + (1 - exponent) / 10 * (_HEIGHT - _BOTTOM - 20)
