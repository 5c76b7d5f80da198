"""What was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

from amanda.tools.nan._summary import Summary
from amanda.tools.results import Column, Result, check_schema, shortened


@dataclass(frozen=True)
class Finding:
    """One op that was given finite values alone and gave others.

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
        """Whether NaN is among what it gave, not only Inf."""
        return any(summary.nan for summary in self.outputs.values())

    def __str__(self) -> str:
        module = f" in {self.module}" if self.module else ""
        given = "; ".join(f"{i}: {summary}" for i, summary in self.inputs.items()) or "no tensor"
        made = "; ".join(f"{i}: {summary}" for i, summary in self.outputs.items())
        return f"{self.type} ({self.phase}){module}, {self.source}\n  given {given}\n  gave {made}"


class NanResult(Result):
    """The ops at which NaN and Inf begin, in the order of execution."""

    name: ClassVar[str] = "nan"
    title = "Where NaN and Inf begin"
    columns: ClassVar[Sequence[Column]] = (
        Column("execution", show="{:,}".format, number=True), Column("phase"), Column("type"),
        Column("module", show=partial(shortened, width=40)),
        Column("source", show=partial(shortened, width=40)),
        Column("given"), Column("gave"),
    )  # fmt: skip

    def __init__(
        self, findings: Sequence[Finding], executions: int, passed_on: int, dropped: int = 0
    ) -> None:
        self.findings = tuple(findings)
        self.executions = executions
        self.passed_on = passed_on
        self._dropped = dropped

    @property
    def first(self) -> Finding | None:
        """The first op that made NaN; the first that made Inf, which may be meant, where none did."""
        return next((one for one in self.findings if one.makes_nan), next(iter(self.findings), None))

    def __bool__(self) -> bool:
        return bool(self.findings)

    def rows(self) -> Sequence[Sequence[Any]]:
        """A row for each op."""
        return [
            (one.execution, one.phase, one.type, one.module, one.source,
             "; ".join(map(str, one.inputs.values())), "; ".join(map(str, one.outputs.values())))
            for one in self.findings
        ]  # fmt: skip

    def facts(self) -> Mapping[str, Any]:
        """Counts, and the findings with their summaries."""
        findings = [asdict(one) for one in self.findings]
        for found in findings:
            for side in ("inputs", "outputs"):
                found[side] = {i: summary._asdict() for i, summary in found[side].items()}
        return {
            "executions": self.executions, "passed_on": self.passed_on, "dropped": self._dropped,
            "findings": findings,
        }  # fmt: skip

    def merged(self, *others: NanResult) -> NanResult:
        """This and other runs or ranks as one; `execution` counts in each of them apart."""
        every = (self, *others)
        return NanResult(
            [finding for one in every for finding in one.findings],
            sum(one.executions for one in every),
            sum(one.passed_on for one in every),
            sum(one._dropped for one in every),
        )

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> NanResult:
        """What `to_dict` gave; raises ValueError for what is not of this schema and version."""
        check_schema(found, cls.name, cls.version)
        findings = [Finding(**{**one, **_summaries(one)}) for one in found["findings"]]
        return cls(findings, found["executions"], found["passed_on"], found.get("dropped", 0))

    def notes(self) -> Sequence[str]:
        """How much was looked at, and what is not in the table."""
        if not self.findings:
            return [f"All of {self.executions:,} executed ops gave finite values or were given others."]
        notes = [f"{self.passed_on:,} of {self.executions:,} executed ops passed on what they were given."]
        if self._dropped:
            notes.append(f"{self._dropped:,} more ops made NaN or Inf; `limit` says how many are kept.")
        return notes


def _summaries(finding: Mapping[str, Any]) -> dict[str, dict[int, Summary]]:
    return {
        side: {
            int(i): Summary(**{**told, "shape": tuple(told["shape"])}) for i, told in finding[side].items()
        }
        for side in ("inputs", "outputs")
    }
