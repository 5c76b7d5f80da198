"""The result: ops that produced NaN or Inf, and findings that a scaled loss defers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from amanda.tools.kit import place_text
from amanda.tools.nan._floats import Summary
from amanda.tools.results import NOTHING, Column, Result, check_schema, count_of, made_of

_NAMED = 3
"""Inputs, and parameters, that a sentence describes."""

FindingKey = tuple[Any, ...]
"""Findings with equal keys are repeats of one."""


@dataclass(frozen=True)
class Finding:
    """One op whose outputs have NaN or Inf while its inputs have none.

    phase: "forward", "backward" or "optimizer".  execution: number of ops executed in the scope before it.
    inputs, outputs: summaries of the tensors, by position.  step: number of the step, from 0.
    times: how many executions of the op did; the other fields are of the first of them.
    """

    phase: str
    type: str
    module: str
    source: str
    execution: int
    inputs: Mapping[int, Summary]
    outputs: Mapping[int, Summary]
    step: int = 0
    times: int = 1

    def __str__(self) -> str:
        return self.sentence

    @property
    def key(self) -> FindingKey:
        """The place of the op, and True for NaN, False for Inf alone."""
        return self.phase, self.type, self.module, self.source, self.makes_nan

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

    @property
    def sentence(self) -> str:
        """The op, its module, line and step, how much it gave of NaN or Inf, and what its inputs were."""
        place = place_text(self.type, self.module, self.phase, self.source)
        input_texts = [f"input {i} was {summary}" for i, summary in self.inputs.items()]
        more = [f"{len(input_texts) - _NAMED:,} more inputs"] if len(input_texts) > _NAMED else []
        # Of an op that made NaN, an output with Inf alone is not the answer.
        outputs = [summary for summary in self.outputs.values() if summary.nan or not self.makes_nan]
        return (
            f"First {'NaN' if self.makes_nan else 'Inf'}: {place}, step {self.step:,}: "
            f"output has {outputs[0].counts_text}; "
            f"{'; '.join([*input_texts[:_NAMED], *more]) or 'no input is a floating tensor'}"
        )


@dataclass(frozen=True)
class Entered:
    """An input or a parameter that has NaN which no instrumented op produced.

    what: "input 0 of linear", "parameter encoder.weight".  phase to execution: of the first op that read it.
    step: number of the step, from 0.  is_consequence: True if an update may have brought it an earlier NaN.
    """

    what: str
    phase: str
    module: str
    source: str
    execution: int
    summary: Summary
    step: int = 0
    is_consequence: bool = False

    def __str__(self) -> str:
        return self.sentence

    @property
    def key(self) -> FindingKey:
        """The tensor, and the place of the op that read it."""
        return self.what, self.module, self.source

    @property
    def sentence(self) -> str:
        """The tensor, how much of it is NaN, and module, line and step of the op that read it first."""
        place = place_text("read", self.module, self.phase, self.source)
        return (
            f"First NaN: {self.what} has {self.summary.counts_text}, {place}, step {self.step:,}; "
            f"no op gave NaN before; it is {self.summary}"
        )


class NanResult(Result):
    """The first NaN in one sentence, and a row for each op that produced NaN or Inf, or tensor that held it.

    Rows are in the order of execution; repeats of an op are one row.  Parameters that an earlier NaN may have
    reached through an update are not in the rows, but in `entered`.
    inf: True if the tool looked for Inf too.  skipped: number of overflowed steps that a GradScaler skipped.
    """

    name: ClassVar[str] = "nan"
    columns: ClassVar[Sequence[Column]] = (
        Column("type"), Column("module"), Column("outputs", priority=2), Column("inputs", priority=3),
        Column("step", show="{:,}".format, number=True), Column("times", show="{:,}".format, number=True),
        Column("source"), Column("phase", shown=False),
        Column("execution", show="{:,}".format, number=True, shown=False),
    )  # fmt: skip

    def __init__(
        self, findings: Sequence[Finding], executions: int, passed_on: int, dropped: int = 0,
        entered: Sequence[Entered] = (), skipped: int = 0, inf: bool = False,
    ) -> None:  # fmt: skip
        # In one order, so that `first` and the sentence name the same op, also of merged results.
        self.findings = tuple(sorted(findings, key=lambda finding: finding.execution))
        self.executions = executions
        self.passed_on = passed_on
        self.entered = tuple(entered)
        self._dropped, self._skipped, self._inf = dropped, skipped, inf

    @property
    def first(self) -> Finding | None:
        """Return the first op that produced NaN, else the first that produced Inf, which may be intended."""
        # NaN first: Inf is often meant, as in masks of attention.
        of_nan = [finding for finding in self.findings if finding.makes_nan]
        return next(iter([*of_nan, *self.findings]), None)

    @property
    def sentence(self) -> str:
        """The answer: where the first NaN, else the first Inf, comes from, or that there is none."""
        origins = [origin for origin in self._origins() if isinstance(origin, Entered) or origin.makes_nan]
        origin = origins[0] if origins else self.first
        if origin is not None:
            return f"{origin.sentence}."
        if not self.executions:
            return NOTHING
        is_partly_read = any("not read" in text for text in self.remarks)
        unread = "; not every output was read" if is_partly_read else ""
        overflows = f"gradients overflowed in {self._skipped_steps}; no op of other steps"
        producers = overflows if self._skipped else "none"
        checked = f"{count_of(self.executions, 'execution')} of ops (not accumulation of gradients)"
        return f"Checked {checked}; {producers} produced {self._sought}{unread}."

    @property
    def _leading(self) -> int:
        # The answer, and what followed from it.
        return 1 + bool(self._consequences)

    @property
    def _shows_table(self) -> bool:
        # The sentence tells of one op all that the table would.
        return len(self._origins()) > 1

    @property
    def _sought(self) -> str:
        return "NaN or Inf" if self._inf else "NaN"

    @property
    def _skipped_steps(self) -> str:
        return f"{count_of(self._skipped, 'step')} that a GradScaler skipped"

    @property
    def _consequences(self) -> Sequence[Entered]:
        return [entry for entry in self.entered if entry.is_consequence]

    def _origins(self) -> list[Finding | Entered]:
        """Return the ops and tensors at which NaN or Inf begins, in the order of execution; each op once."""
        origins_by_key: dict[FindingKey, Finding | Entered] = {}
        origins: list[Finding | Entered] = [entry for entry in self.entered if not entry.is_consequence]
        origins += self.findings
        for origin in sorted(origins, key=lambda origin: origin.execution):
            fold(origins_by_key, origin)
        return list(origins_by_key.values())

    def __bool__(self) -> bool:
        return bool(self.findings or self.entered)

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each op, input and parameter at which NaN or Inf begins."""
        return [
            (origin.what, origin.module, "", origin.summary.values_text, origin.step, 1, origin.source,
             origin.phase, origin.execution)
            if isinstance(origin, Entered) else
            (origin.type, origin.module, _values_text(origin.outputs), _values_text(origin.inputs),
             origin.step, origin.times, origin.source, origin.phase, origin.execution)
            for origin in self._origins()
        ]  # fmt: skip

    def _facts(self) -> Mapping[str, Any]:
        """Return counts, and the findings with their summaries."""
        return {
            "sentence": self.sentence, "executions": self.executions, "passed_on": self.passed_on,
            "dropped": self._dropped, "findings": [finding.to_dict() for finding in self.findings],
            "entered": [{**asdict(entry), "summary": entry.summary._asdict()} for entry in self.entered],
            "skipped": self._skipped, "inf": self._inf,
        }  # fmt: skip

    def merged(self, *results: NanResult) -> NanResult:
        """Return this and other runs or ranks as one result; `execution` is a number within each run."""
        all_results = (self, *results)
        return NanResult(
            [finding for result in all_results for finding in result.findings],
            sum(result.executions for result in all_results), sum(result.passed_on for result in all_results),
            dropped=sum(result._dropped for result in all_results),
            entered=[entered for result in all_results for entered in result.entered],
            skipped=sum(result._skipped for result in all_results),
            inf=any(result._inf for result in all_results),
        )  # fmt: skip

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
        """Return the answer, what followed from it, and what the table does not show."""
        notes = [self.sentence]
        if consequences := self._consequences:
            names = [entry.what.removeprefix("parameter ") for entry in consequences]
            more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
            noun = f"{len(names):,} parameters were" if len(names) > 1 else "A parameter was"
            first_step = min(entry.step for entry in consequences)
            notes.append(f"{noun} NaN after it, from step {first_step:,}: {', '.join(names[:_NAMED])}{more}.")
        if self:
            passed_on = f"; {self.passed_on:,} passed on {self._sought} from their inputs"
            checked = f"Checked {count_of(self.executions, 'execution')} of ops"
            notes.append(f"{checked}{passed_on if self.passed_on else ''}.")
        inputs = [summary for finding in self.findings for summary in finding.inputs.values()]
        if not self._inf and any(summary.inf for summary in inputs):
            notes.append("Some inputs were Inf: nan:inf (shell) or NanTool(inf=True) (Python) says where.")
        if self._dropped:
            notes.append(f"{self._dropped:,} more ops produced {self._sought}; raise `limit` to see them.")
        if self._skipped and self:
            notes.append(f"Not counted: ops of {self._skipped_steps}, whose gradients overflowed.")
        return notes


def fold(findings: dict[FindingKey, Any], finding: Finding | Entered) -> None:
    """Add a finding, or add the times of a repeat to the first with its key."""
    first = findings.setdefault(finding.key, finding)
    if first is not finding and isinstance(finding, Finding):
        findings[finding.key] = replace(first, times=first.times + finding.times)


def _values_text(summaries: Mapping[int, Summary]) -> str:
    return "; ".join(summary.values_text for summary in summaries.values())


class ScaledBackward:
    """Findings of a scaled backward pass, deferred until the scaler has checked the gradients.

    pending: findings that a scale which is too large would explain, repeats folded.  skipped: number of
    steps with such findings that the scaler skipped.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.pending: dict[FindingKey, Finding | Entered] = {}
        self.skipped = 0
        self._skipped_step: int | None = None

    def begin(self) -> None:
        self.is_open, self._skipped_step = True, None

    def defer(self, finding: Finding | Entered, step: int) -> bool:
        """Defer a finding that an overflow would explain, or drop it in a skipped step; else return False.

        Accumulation of gradients adds Inf to -Inf, which is NaN, between two ops.
        """
        # What clips the gradients of a step that the scaler will skip reads the overflow as well.
        if step == self._skipped_step and finding.phase != "optimizer":
            return True
        if not self.is_open or finding.phase != "backward":
            return False
        # With a scale that is too large, gradients are Inf first, and NaN where two of them cancel.
        may_be_overflow = (
            isinstance(finding, Entered)
            or not finding.makes_nan
            or any(summary.inf for summary in finding.inputs.values())
        )
        if may_be_overflow:
            fold(self.pending, finding)
        return may_be_overflow

    def end(self, is_skipped: bool, step: int) -> list[Finding | Entered]:
        """Return the deferred findings; none if the scaler skips the step: overflows explain them."""
        pending, self.pending, self.is_open = list(self.pending.values()), {}, False
        self._skipped_step = step if is_skipped else None
        if is_skipped and pending:
            self.skipped += 1
        return [] if is_skipped else pending
