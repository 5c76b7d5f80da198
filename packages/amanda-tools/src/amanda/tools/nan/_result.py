"""The ops that made NaN or Inf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

from amanda.tools.nan._summary import Summary
from amanda.tools.results import Column, Result, check_schema, made_of, shortened


@dataclass(frozen=True)
class Finding:
    """One op at which NaN or Inf begins: it gave what nothing was that it was given.

    phase: "forward", "backward" or "optimizer".  execution: how many ops had been executed in the scope
    before it.
    inputs, outputs: a summary for each tensor that went in or came out, by its position.
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
        """True if the op gave NaN, not only Inf."""
        return any(summary.nan for summary in self.outputs.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        sides = {side: getattr(self, side).items() for side in ("inputs", "outputs")}
        told = {side: {i: summary._asdict() for i, summary in each} for side, each in sides.items()}
        return {**asdict(self), **told}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Finding:
        """Return the finding that `to_dict` described."""
        sides = {side: found[side].items() for side in ("inputs", "outputs")}
        read = {side: {int(i): Summary.from_dict(one) for i, one in each} for side, each in sides.items()}
        return made_of(cls, {**found, **read})

    def __str__(self) -> str:
        module = f" in {self.module}" if self.module else ""
        given = "; ".join(f"{i}: {summary}" for i, summary in self.inputs.items()) or "no tensor"
        made = "; ".join(f"{i}: {summary}" for i, summary in self.outputs.items())
        return f"{self.type} ({self.phase}){module}, {self.source}\n  given {given}\n  gave {made}"


@dataclass(frozen=True)
class Entered:
    """An input or a parameter that held NaN, which no op that was seen had given.

    what: "input 0 of linear", "parameter encoder.weight".  The op that read it first: phase, module, source,
    execution.
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
    """The inputs and parameters that held NaN, and the ops at which NaN and Inf begin, as they were executed.

    inf: whether Inf was looked for.  skipped: how many steps of a GradScaler were left out that overflowed.
    """

    name: ClassVar[str] = "nan"
    title = "Where NaN and Inf begin"
    columns: ClassVar[Sequence[Column]] = (
        Column("execution", show="{:,}".format, number=True), Column("phase"), Column("type"),
        Column("module", show=partial(shortened, width=40)),
        Column("source", show=partial(shortened, width=40)),
        Column("given"), Column("gave"),
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
        """The first op that made NaN; the first that made Inf, which may be meant, where none did."""
        return next((one for one in self.findings if one.makes_nan), next(iter(self.findings), None))

    def __bool__(self) -> bool:
        return bool(self.findings or self.entered)

    def rows(self) -> Sequence[Sequence[Any]]:
        """A row for each input and parameter, then for each op."""
        entered = [
            (one.execution, one.phase, one.what, one.module, one.source, str(one.summary), "")
            for one in self.entered
        ]
        return entered + [
            (one.execution, one.phase, one.type, one.module, one.source,
             "; ".join(map(str, one.inputs.values())), "; ".join(map(str, one.outputs.values())))
            for one in self.findings
        ]  # fmt: skip

    def facts(self) -> Mapping[str, Any]:
        """Counts, and the findings with their summaries."""
        return {
            "executions": self.executions, "passed_on": self.passed_on, "dropped": self._dropped,
            "findings": [one.to_dict() for one in self.findings], "skipped": self._skipped, "inf": self._inf,
            "entered": [{**asdict(one), "summary": one.summary._asdict()} for one in self.entered],
        }  # fmt: skip

    def merged(self, *others: NanResult) -> NanResult:
        """This and other runs or ranks as one; `execution` counts in each of them apart."""
        every = (self, *others)
        return NanResult(
            [finding for one in every for finding in one.findings],
            sum(one.executions for one in every),
            sum(one.passed_on for one in every),
            sum(one._dropped for one in every),
            [entered for one in every for entered in one.entered],
            sum(one._skipped for one in every),
            any(one._inf for one in every),
        )

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> NanResult:
        """Return the result that `to_dict` described; raises ValueError for another schema or version."""
        check_schema(found, cls.name, cls.version)
        findings = [Finding.from_dict(one) for one in found["findings"]]
        entered = [
            made_of(Entered, {**one, "summary": Summary.from_dict(one["summary"])})
            for one in found.get("entered", ())
        ]
        counts = found["executions"], found["passed_on"], found.get("dropped", 0)
        return cls(findings, *counts, entered, found.get("skipped", 0), found.get("inf", True))

    def notes(self) -> Sequence[str]:
        """Return sentences about NaN in inputs, the number of ops, and ops that are not in the table."""
        notes = [f"{one.what} holds {one.summary.nan:,} NaN." for one in self.entered]
        sought = "NaN or Inf" if self._inf else "NaN"
        if self:
            notes.append(
                f"{self.passed_on:,} of {self.executions:,} executed ops passed on what they were given."
            )
        else:
            notes.append(f"All of {self.executions:,} executed ops gave no {sought}.")
        if not self._inf and any(one.inf for found in self.findings for one in found.inputs.values()):
            notes.append("Some were given Inf; where that begins, the option `inf` tells.")
        if self._dropped:
            notes.append(f"{self._dropped:,} more ops made {sought}; `limit` says how many are kept.")
        if self._skipped:
            steps = f"{self._skipped:,} steps that a GradScaler skipped"
            notes.append(f"Not in the table: ops of {steps}, whose gradients overflowed.")
        return notes
