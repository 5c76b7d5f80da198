"""Results: the changed elements, and the outcomes of the trials of a campaign."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import sqrt
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from amanda.errors import AmandaError
from amanda.options import NonNegativeInt, PositiveFloat, checked
from amanda.tools.inject._faults import InjectError
from amanda.tools.results import Column, KeyedResult, Result, shortened


@dataclass(frozen=True)
class Injection:
    """One changed element.

    op: id of the op, forward or backward.  execution: number of the op's execution, from 0.
    tensor: e.g. "outputs[0]".  element: index in the tensor.  bits: positions of changed bits, 0 the least
    significant; empty for faults of values.  old, new: the element before and after.
    """

    phase: str
    type: str
    module: str
    source: str
    op: int
    execution: int
    tensor: str
    dtype: str
    element: tuple[int, ...]
    bits: tuple[int, ...]
    old: Any
    new: Any

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values for JSON; complex numbers, NaN and Inf are strings."""
        fields = {**asdict(self), "op": f"{self.op:#018x}"}
        for name in ("old", "new"):
            if isinstance(fields[name], complex) or not math.isfinite(fields[name]):
                fields[name] = str(fields[name])
        return fields


class InjectResult(Result):
    """A row for each changed element, in the order of injection.

    total: number of changed elements.  unselected_types: types of the analysed ops, if none was selected.
    """

    name: ClassVar[str] = "inject"
    title = "Injected faults"
    columns: ClassVar[Sequence[Column]] = (
        Column("phase"), Column("type"), Column("module", show=partial(shortened, width=32)),
        Column("source", show=partial(shortened, width=32)), Column("op"), Column("execution", number=True),
        Column("tensor"), Column("dtype"), Column("element"), Column("bits"),
        Column("old", number=True), Column("new", number=True),
    )  # fmt: skip

    def __init__(
        self, injections: Sequence[Injection], total: int, executions: int,
        unselected_types: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.injections = tuple(injections)
        self.total = total
        self.executions = executions
        self._unselected_types = sorted(unselected_types)

    def counts(self, key: str) -> dict[Any, int]:
        """Return the number of injections by the value of a field: "phase", "type", "module", "bits"."""
        return dict(Counter(getattr(injection, key) for injection in self.injections))

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each element."""
        return [
            tuple(
                " ".join(map(str, value)) if isinstance(value, tuple) else value for value in fields.values()
            )
            for fields in (injection.to_dict() for injection in self.injections)
        ]

    def facts(self) -> Mapping[str, Any]:
        """Return the numbers of changed elements, also beyond `limit`, and of executions."""
        return {"injected": self.total, "executions": self.executions}

    def notes(self) -> Sequence[str]:
        """Return sentences on the number of elements, and on the types of ops if none was selected."""
        notes = [f"{self.total:,} elements changed in {self.executions:,} executions of the selected ops."]
        if self.total > len(self.injections):
            notes.append(
                f"The table has the first {len(self.injections):,} elements; raise `limit` for more."
            )
        if self._unselected_types:
            notes.append(f"No op was selected; there were {', '.join(self._unselected_types)}.")
        return notes


Outcome = Literal["masked", "sdc", "nan", "crash", "hang", "no_fault"]
"""Outcome of a trial; `sdc` is silent data corruption: a wrong output without an error."""
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
COUNTED = OUTCOMES[:-1]
KEYS = ("phase", "type", "module", "source", "dtype", "bit")


@dataclass(frozen=True)
class Trial:
    """One run of the program with faults.

    outcome: "masked": the output equals the one without faults; "sdc" (silent data corruption): the output
    differs; "nan": it has new NaN or Inf; "crash": the program raised `error`; "hang": the program ran too
    long and was stopped; "no_fault": no element was changed.
    """

    number: int
    outcome: Outcome
    injections: tuple[Injection, ...]
    error: str = ""


class Rate(NamedTuple):
    """A share, and the ends of its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f})"


@checked(error=InjectError)
def wilson(successes: NonNegativeInt, trials: NonNegativeInt, z: PositiveFloat = 1.959963984540054) -> Rate:
    """Return a share with its score interval; (0, 0, 1) for no trials.  Source: Wilson 1927."""
    if not trials:
        return Rate(0.0, 0.0, 1.0)
    if successes > trials:
        raise InjectError(f"successes is {successes} and trials {trials}; give at most as many as trials")
    share, square = successes / trials, z * z
    middle = (share + square / (2 * trials)) / (1 + square / trials)
    half = z / (1 + square / trials) * sqrt(share * (1 - share) / trials + square / (4 * trials * trials))
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    return Rate(share, low, 1.0 if successes == trials else min(1.0, middle + half))


class CampaignResult(KeyedResult):
    """Counts of trials by outcome, for each type of op or other keys.

    by: the keys of a row, of `KEYS`.  A trial with several injections is in the row of each.
    """

    name: ClassVar[str] = "inject_campaign"
    keys: ClassVar[Sequence[str]] = KEYS
    counted: ClassVar[Sequence[Column]] = (
        *(Column(name, show="{:,}".format, number=True) for name in ("trials", *COUNTED)),
        *(
            Column(name, show=lambda share: f"{100 * share:.1f} %", number=True, unit="share")
            for name in ("SDC rate", "low", "high")
        ),
    )

    def __init__(
        self, trials: Iterable[Trial], seed: int, sites: int, by: Sequence[str] = ("phase", "type")
    ) -> None:
        self.trials = tuple(trials)
        self.seed, self.sites = seed, sites
        self.tell_by(by, f"Outcomes of {len(self.trials):,} trials")

    def count(self, outcome: Outcome) -> int:
        """Return the number of trials with an outcome; raise AmandaError for an unknown outcome."""
        if outcome not in OUTCOMES:
            raise AmandaError(f"{outcome!r} is no outcome; they are {', '.join(OUTCOMES)}")
        return sum(trial.outcome == outcome for trial in self.trials)

    def rate(self, *outcomes: Outcome) -> Rate:
        """Return the share of these outcomes in the trials with faults."""
        trials_with_faults = len(self.trials) - self.count("no_fault")
        return wilson(sum(self.count(outcome) for outcome in outcomes), trials_with_faults)

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each value of the keys, sorted, without the trials that had no fault."""
        groups: dict[tuple[str, ...], dict[int, Trial]] = {}
        for trial in self.trials:
            for injection in trial.injections:
                groups.setdefault(_row_key(injection, self._by), {})[trial.number] = trial
        rows = []
        for key in sorted(groups, key=lambda key: [_sort_key(part) for part in key]):
            outcomes = [trial.outcome for trial in groups[key].values()]
            counts = [outcomes.count(outcome) for outcome in COUNTED]
            rows.append((*key, len(outcomes), *counts, *wilson(outcomes.count("sdc"), len(outcomes))))
        return rows

    def facts(self) -> Mapping[str, Any]:
        """Return the rate of each outcome, and every trial with its injections."""
        rates = {outcome: self.rate(outcome)._asdict() for outcome in COUNTED}
        trials = [
            {**vars(trial), "injections": [injection.to_dict() for injection in trial.injections]}
            for trial in self.trials
        ]
        return {"seed": self.seed, "sites": self.sites, "rates": rates, "trials": trials}

    def notes(self) -> Sequence[str]:
        """Return sentences on the rates of all trials."""
        rates = "; ".join(f"{outcome} {self.rate(outcome)}" for outcome in COUNTED if self.count(outcome))
        notes = [
            f"Seed {self.seed}, {self.sites:,} executions of ops with tensors for faults.",
            f"Shares with 95 % confidence intervals (Wilson): {rates or 'no trial had a fault'}.",
        ]
        if unchanged := self.count("no_fault"):
            notes.append(f"No element changed in {unchanged:,} trials.")
        return notes


def _row_key(injection: Injection, by: Sequence[str]) -> tuple[str, ...]:
    bits = " ".join(map(str, injection.bits))
    return tuple(bits if key == "bit" else getattr(injection, key) for key in by)


def _sort_key(part: str) -> tuple[list[int], str]:
    """Return a sort key: bits by their positions, words by their letters."""
    numbers = part.split() if part.replace(" ", "").isdigit() else []
    return [int(number) for number in numbers], part
