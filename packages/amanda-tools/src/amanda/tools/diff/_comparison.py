"""Comparison of one op of two runs."""

from __future__ import annotations

from dataclasses import dataclass

from amanda.tools.diff._compare import TOLERANCES


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
        other = " in ".join(filter(None, (self.other_type, self.other_module)))
        lines = [", ".join(filter(None, one)) for one in ((place, self.source), (other, self.other_source))]
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
            loosest = max(TOLERANCES.get(one, 0.0) for one in self.dtypes)
            kinds = f"{self.dtypes[0]} in a, {self.dtypes[1]} in b"
            lines.append(f"  {kinds}; rtol={loosest:g} allows for the less precise")
        if self.inputs is not None:
            lines.append(f"  its inputs {'agree' if self.inputs else 'differ'}")
        if self.weight is not None:
            lines.append(f"  relative error of its weight {self.weight:.3g}")
        return "\n".join(lines)
