"""Comparison of an op of two runs, and the sentences on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amanda.tools.diff._errors import TOLERANCES
from amanda.tools.dump import Entry, Op

if TYPE_CHECKING:
    from amanda.tools.diff._result import DiffResult


@dataclass(frozen=True)
class Comparison:
    """One execution of an op that both runs have, or the output of a module.

    phase to source: of run a.  other_type to other_source: of run b.  relative: L2 norm of the difference
    over the larger norm of the two; inf if NaN, Inf or shapes differ.  cosine: of the angle between the
    tensors; None if only summaries are known.  largest: largest magnitude of a difference.  exact: True if
    all numbers were compared, False for a sample.  tolerance: largest `relative` at which the tensors agree.
    by_type: tolerance of the element types alone; earlier ops may raise it.  dtypes: element types of both.
    inputs: True if the inputs agree; None if that is unknown or nothing differs.  weight: relative error of
    the weight; None likewise.  expected: relative error between run a and the control; None without a
    control.  read: inputs and weights of the op in run a, in words.  failure: error of run b at this op.
    is_retyped: True if the runs differ in the element type of this op, and not in that of most products.
    only: "a" or "b" for an op that is the cause and has no counterpart; the first fields are of that run, and
    `relative` is of what the next op reads.  reason: why such an op is the cause, in words.
    """

    phase: str
    type: str
    module: str
    source: str
    other_type: str
    other_module: str
    other_source: str
    execution: int
    relative: float
    cosine: float | None
    largest: float
    exact: bool
    tolerance: float
    by_type: float
    dtypes: tuple[str, str]
    inputs: bool | None = None
    weight: float | None = None
    expected: float | None = None
    read: str = ""
    failure: str = ""
    is_retyped: bool = False
    only: str = ""
    reason: str = ""

    @property
    def diverges(self) -> bool:
        """True if the relative error is larger than the tolerance, or the op has two element types."""
        return self.relative > self.tolerance or self.is_retyped

    @property
    def verdict(self) -> str:
        """ "same" to the last bit, "close" within the tolerance, or "different"."""
        return "different" if self.diverges else "close" if self.relative else "same"

    @property
    def place(self) -> str:
        """Type, module, phase and source line in run a; also those of run b if type or module differ."""
        place = " in ".join(filter(None, (self.type, self.module)))
        if self.only or (self.type, self.module) == (self.other_type, self.other_module):
            return ", ".join(filter(None, (f"{place} ({self.phase})", self.source)))
        other_place = " in ".join(filter(None, (self.other_type, self.other_module)))
        lines = [
            ", ".join(filter(None, parts))
            for parts in ((place, self.source), (other_place, self.other_source))
        ]
        return f"{lines[0]} ({self.phase}), which is {lines[1]} in b"

    def __str__(self) -> str:
        place = " in ".join(filter(None, (self.type, self.module)))
        lines = [", ".join(filter(None, (f"{place} ({self.phase})", self.source)))]
        if self.only:
            lines.append(f"  {self.reason}")
        elif (self.type, self.module) != (self.other_type, self.other_module):
            lines.append(f"  against {' in '.join(filter(None, (self.other_type, self.other_module)))}")
        if self.other_source and self.other_source != self.source:
            lines.append(f"  at {self.other_source} in b")
        cosine = "" if self.cosine is None else f", cosine {self.cosine:.6g}"
        lines.append(
            f"  relative error {self.relative:.3g} (tolerance {self.tolerance:g}){cosine}, "
            f"largest difference {self.largest:.3g}, execution {self.execution}"
        )
        if self.dtypes[0] != self.dtypes[1]:
            loosest = max(TOLERANCES.get(dtype, 0.0) for dtype in self.dtypes)
            kinds = f"{self.dtypes[0]} in a, {self.dtypes[1]} in b"
            lines.append(f"  {kinds}; rtol={loosest:g} is the tolerance of the less precise type")
        if self.inputs is not None:
            lines.append(f"  its inputs {'agree' if self.inputs else 'differ'}")
        if self.weight is not None:
            lines.append(f"  relative error of its weight {self.weight:.3g}")
        return "\n".join(lines)


_STEP = 2.0
"""How many times the error before it an error is that the growth shows."""
_SHOWN = 8
_READ = 2
"""Tensors that an op read that are named."""


def sentence(result: DiffResult) -> str:
    """Return the first difference: op, error, expected error, inputs, and the result with a's value in b."""
    first = result.first
    if first is None:
        worst = max(result.comparisons, key=lambda comparison: comparison.relative)
        if not worst.relative:
            return f"No difference: all {len(result.comparisons):,} are the same to the last bit"
        largest = f"{_error_text(worst)}, at {worst.place}"
        return f"No difference beyond the tolerance: relative error at most {largest}"
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
    if result.remaining is not None:
        parts.append(_remaining_text(first, result.remaining))
    return "; ".join(parts)


def _error_text(comparison: Comparison) -> str:
    if comparison.expected is None:
        return f"{comparison.relative:.2g} (allowed {comparison.tolerance:.2g})"
    return f"{comparison.relative:.2g} (expected {comparison.expected:.2g})"


def _remaining_text(first: Comparison, remaining: DiffResult) -> str:
    """Return what remains of the difference if the op, or the op that reads it, gives a's value in b."""
    replaced = f"with a's value in {'the place of what reads it' if first.only else 'its place'}"
    if remaining.first is None:
        worst = max((comparison.relative for comparison in remaining.comparisons), default=0.0)
        remainder = "not one bit of it" if not worst else f"no more than {worst:.2g}"
        return f"{replaced}, {remainder} remains"
    there = remaining.first
    if there.place == first.place and there.dtypes[0] != there.dtypes[1]:
        return f"{replaced}, rounded to {there.dtypes[1]}, {there.relative:.2g} remains there"
    return f"{replaced}, the runs next differ at {there.place}: {there.relative:.2g}"


def growth(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the first op that diverges, those at which the error is twice what it was, and the last op."""
    at = next((i for i, comparison in enumerate(comparisons) if comparison.diverges), None)
    if at is None or comparisons[at].failure:
        return []
    steps = [comparisons[at]]
    for comparison in comparisons[at + 1 :]:
        if comparison.relative >= _STEP * steps[-1].relative and len(steps) < _SHOWN:
            steps.append(comparison)
    last = comparisons[-1]
    return steps if last is steps[-1] else [*steps, last]


def growth_lines(comparisons: Sequence[Comparison]) -> list[str]:
    """Return a line for each op of `growth`."""
    steps = growth(comparisons)
    lines = [
        f"  {comparison.relative:9.2g}  {comparison.place}, execution {comparison.execution}"
        for comparison in steps
    ]
    return ["How the error grows, up to the last op:", *lines] if lines else []


def reading_text(read: Iterable[tuple[Entry, float, bool]], op: Op) -> str:
    """Return a text on the inputs of an op of run a: those that differ, or else the first ones.

    read: tensors of run a, their relative errors, and whether they agree.
    """
    parameters = dict(op.parameters)
    tensors = list(read)
    listed = [tensor for tensor in tensors if not tensor[2]] or tensors
    words = []
    for entry, relative, agrees in listed[:_READ]:
        statistics = entry.summary.statistics
        span = f" from {statistics.least:.3g} to {statistics.most:.3g}" if statistics.count else ""
        odd = statistics.nan + statistics.inf + statistics.negative_inf
        apart = "" if agrees else f" by {relative:.2g}"
        words.append(
            f"{_name(entry, parameters)}{apart}: {entry.dtype} {list(entry.shape)}{span}"
            f"{f' with {odd:,} NaN or Inf' if odd else ''}"
        )
    return ", ".join(words)


def _name(entry: Entry, parameters: Mapping[int, str]) -> str:
    if entry.role == "input" and entry.position in parameters:
        return f"parameter {parameters[entry.position]}"
    return f"{entry.role} {entry.position}"
