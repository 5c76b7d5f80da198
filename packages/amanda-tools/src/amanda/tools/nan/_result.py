"""The result: ops that produced NaN or Inf, and findings that a scaled loss defers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from amanda.tools.nan._floats import Summary
from amanda.tools.results import Column, Result, check_schema, made_of


@dataclass(frozen=True)
class Finding:
    """One op whose outputs have NaN or Inf while its inputs have none.

    phase: "forward", "backward" or "optimizer".  execution: number of ops executed in the scope before it.
    inputs, outputs: summaries of the tensors, by position.
    """

    phase: str
    type: str
    module: str
    source: str
    execution: int
    inputs: Mapping[int, Summary]
    outputs: Mapping[int, Summary]

    @property
    def makes_nan(self) -> bool:
        """True if an output has NaN, not only Inf."""
        return any(summary.nan for summary in self.outputs.values())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        sides = {side: getattr(self, side).items() for side in ("inputs", "outputs")}
        summaries = {side: {i: summary._asdict() for i, summary in items} for side, items in sides.items()}
        return {**asdict(self), **summaries}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Finding:
        """Return the finding that `to_dict` described."""
        sides = {side: content[side].items() for side in ("inputs", "outputs")}
        summaries = {
            # Keys of JSON are text.
            side: {int(i): Summary.from_dict(fields) for i, fields in items}
            for side, items in sides.items()
        }
        return made_of(cls, {**content, **summaries})

    def __str__(self) -> str:
        module = f" in {self.module}" if self.module else ""
        inputs = "; ".join(f"{i}: {summary}" for i, summary in self.inputs.items()) or "no tensor"
        outputs = "; ".join(f"{i}: {summary}" for i, summary in self.outputs.items())
        return f"{self.type} ({self.phase}){module}, {self.source}\n  inputs {inputs}\n  outputs {outputs}"


@dataclass(frozen=True)
class Entered:
    """An input or a parameter that has NaN which no instrumented op produced.

    what: "input 0 of linear", "parameter encoder.weight".  phase to execution: of the first op that read it.
    """

    what: str
    phase: str
    module: str
    source: str
    execution: int
    summary: Summary

    def __str__(self) -> str:
        return f"{self.what}, {self.source}, which holds {self.summary.nan} NaN\n  {self.summary}"


class NanResult(Result):
    """Inputs and parameters that have NaN, and ops that produce NaN or Inf, in the order of execution.

    inf: True if the tool looked for Inf too.  skipped: number of overflowed steps that a GradScaler skipped.
    """

    name: ClassVar[str] = "nan"
    title = "First NaN and Inf"
    columns: ClassVar[Sequence[Column]] = (
        Column("execution", show="{:,}".format, number=True, priority=-1),
        *map(Column, ("phase", "type", "module", "source")),
        Column("inputs", priority=3), Column("outputs", priority=2),
    )  # fmt: skip

    def __init__(
        self,
        findings: Sequence[Finding],
        executions: int,
        passed_on: int,
        dropped: int = 0,
        entered: Sequence[Entered] = (),
        skipped: int = 0,
        inf: bool = False,
    ) -> None:
        self.findings = tuple(findings)
        self.executions = executions
        self.passed_on = passed_on
        self.entered = tuple(entered)
        self._dropped, self._skipped, self._inf = dropped, skipped, inf

    @property
    def first(self) -> Finding | None:
        """Return the first op that produced NaN, else the first that produced Inf, which may be intended."""
        # NaN first: Inf is often meant, as in masks of attention.
        return next(
            (finding for finding in self.findings if finding.makes_nan), next(iter(self.findings), None)
        )

    def __bool__(self) -> bool:
        return bool(self.findings or self.entered)

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each input and parameter, then for each op."""
        entered = [
            (entry.execution, entry.phase, entry.what, entry.module, entry.source, str(entry.summary), "")
            for entry in self.entered
        ]
        return entered + [
            (finding.execution, finding.phase, finding.type, finding.module, finding.source,
             "; ".join(map(str, finding.inputs.values())), "; ".join(map(str, finding.outputs.values())))
            for finding in self.findings
        ]  # fmt: skip

    def _facts(self) -> Mapping[str, Any]:
        """Return counts, and the findings with their summaries."""
        return {
            "executions": self.executions, "passed_on": self.passed_on, "dropped": self._dropped,
            "findings": [finding.to_dict() for finding in self.findings],
            "entered": [{**asdict(entry), "summary": entry.summary._asdict()} for entry in self.entered],
            "skipped": self._skipped, "inf": self._inf,
        }  # fmt: skip

    def merged(self, *results: NanResult) -> NanResult:
        """Return this and other runs or ranks as one result; `execution` is a number within each run."""
        all_results = (self, *results)
        return NanResult(
            findings=[finding for result in all_results for finding in result.findings],
            executions=sum(result.executions for result in all_results),
            passed_on=sum(result.passed_on for result in all_results),
            dropped=sum(result._dropped for result in all_results),
            entered=[entered for result in all_results for entered in result.entered],
            skipped=sum(result._skipped for result in all_results),
            inf=any(result._inf for result in all_results),
        )

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> NanResult:
        """Return the result that `to_dict` described; raises ValueError for another schema or version."""
        check_schema(content, cls.name, cls.version)
        findings = [Finding.from_dict(finding) for finding in content["findings"]]
        entered = [
            made_of(Entered, {**fields, "summary": Summary.from_dict(fields["summary"])})
            for fields in content.get("entered", ())
        ]
        counts = content["executions"], content["passed_on"], content.get("dropped", 0)
        return cls(findings, *counts, entered, content.get("skipped", 0), content.get("inf", True))

    def notes(self) -> Sequence[str]:
        """Return sentences about NaN in inputs, the number of ops, and ops that are not in the table."""
        notes = [f"{entry.what} holds {entry.summary.nan:,} NaN." for entry in self.entered]
        sought = "NaN or Inf" if self._inf else "NaN"
        if self:
            notes.append(
                f"{self.executions:,} ops ran; {self.passed_on:,} only passed on {sought} from their inputs."
            )
        else:
            notes.append(f"{self.executions:,} ops ran; none produced {sought}.")
        inputs = [summary for finding in self.findings for summary in finding.inputs.values()]
        if not self._inf and any(summary.inf for summary in inputs):
            notes.append("Some inputs were Inf. Use `nan:inf` to find where Inf starts.")
        if self._dropped:
            notes.append(f"{self._dropped:,} more ops produced {sought}; raise `limit` to see them.")
        if self._skipped:
            steps = f"{self._skipped:,} steps that a GradScaler skipped"
            notes.append(f"Not in the table: ops of {steps}, whose gradients overflowed.")
        return notes


class ScaledBackward:
    """Findings of a scaled backward pass, deferred until the scaler has checked the gradients.

    pending: findings that a scale which is too large would explain.  skipped: number of steps with such
    findings that the scaler skipped.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.pending: list[Finding | Entered] = []
        self.skipped = 0

    def defer(self, finding: Finding | Entered) -> bool:
        """Defer a finding that an overflow would explain; return True if it was deferred.

        Accumulation of gradients adds Inf to -Inf, which is NaN, between two ops.
        """
        if not self.is_open or finding.phase != "backward":
            return False
        overflow = (
            # With a scale that is too large, gradients are Inf first, and NaN where two of them cancel.
            isinstance(finding, Entered)
            or not finding.makes_nan
            or any(summary.inf for summary in finding.inputs.values())
        )
        if overflow:
            self.pending.append(finding)
        return overflow

    def end(self, is_skipped: bool) -> list[Finding | Entered]:
        """Return the findings that no overflow of a skipped step explains."""
        pending, self.pending, self.is_open = self.pending, [], False
        if is_skipped and pending:
            self.skipped += 1
        return [] if is_skipped else pending
