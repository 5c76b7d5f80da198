"""Outcomes of the trials of a campaign, with rates and their confidence intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from amanda.errors import AmandaError
from amanda.options import NonNegativeInt, PositiveFloat, checked
from amanda.tools.inject._faults import InjectError
from amanda.tools.inject._result import Injection
from amanda.tools.results import Column, KeyedResult

Outcome = Literal["masked", "sdc", "nan", "crash", "hang", "no_fault"]
"""The outcome of a trial; `sdc` is silent data corruption: another output without an error."""
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
        happened = len(self.trials) - self.count("no_fault")
        return wilson(sum(self.count(outcome) for outcome in outcomes), happened)

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each value of the keys, sorted; trials without faults are left out."""
        groups: dict[tuple[str, ...], dict[int, Trial]] = {}
        for trial in self.trials:
            for one in trial.injections:
                groups.setdefault(_key(one, self._by), {})[trial.number] = trial
        rows = []
        for key in sorted(groups, key=lambda key: [_order(part) for part in key]):
            outcomes = [trial.outcome for trial in groups[key].values()]
            counts = [outcomes.count(outcome) for outcome in COUNTED]
            rows.append((*key, len(outcomes), *counts, *wilson(outcomes.count("sdc"), len(outcomes))))
        return rows

    def facts(self) -> Mapping[str, Any]:
        """Return the rate of each outcome, and every trial with its injections."""
        rates = {outcome: self.rate(outcome)._asdict() for outcome in COUNTED}
        trials = [
            {**vars(trial), "injections": [one.to_dict() for one in trial.injections]}
            for trial in self.trials
        ]
        return {"seed": self.seed, "sites": self.sites, "rates": rates, "trials": trials}

    def notes(self) -> Sequence[str]:
        """Return sentences on the rates of all trials."""
        rates = "; ".join(f"{outcome} {self.rate(outcome)}" for outcome in COUNTED if self.count(outcome))
        notes = [
            f"Seed {self.seed}, {self.sites:,} executions of ops in which faults fit.",
            f"Shares with 95 % confidence intervals (Wilson): {rates or 'no fault happened'}.",
        ]
        if nothing := self.count("no_fault"):
            notes.append(f"In {nothing:,} trials nothing was changed.")
        return notes


def _key(injection: Injection, by: Sequence[str]) -> tuple[str, ...]:
    bits = " ".join(map(str, injection.bits))
    return tuple(bits if key == "bit" else getattr(injection, key) for key in by)


def _order(part: str) -> tuple[list[int], str]:
    """Return a sort key: bits by their positions, words by their letters."""
    numbers = part.split() if part.replace(" ", "").isdigit() else []
    return [int(number) for number in numbers], part
