"""Results of campaigns: trials, their outcomes, rates and intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from amanda.errors import AmandaError
from amanda.options import NonNegativeInt, PositiveFloat, checked
from amanda.tools.inject._faults import InjectError, Injection, Site
from amanda.tools.results import Column, KeyedResult

Outcome = Literal["masked", "sdc", "nan", "crash", "hang", "no_fault"]
"""Outcome of a trial; `sdc` is silent data corruption: a wrong output without an error."""
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
COUNTED = OUTCOMES[:-1]
KEYS = ("phase", "type", "module", "source", "dtype", "bit")


@dataclass(frozen=True)
class Trial:
    """One run of the program with faults.

    outcome: "masked": the output equals the one without faults; "sdc" (silent data corruption): the output
    differs; "nan": it has new NaN or Inf; "crash": the program raised `error`, or its process ended;
    "hang": the program ran too long and was stopped; "no_fault": no element was changed; or a word that the
    campaign's `compare` returned.
    site: where the fault was, if the process ended and took the injections along.
    """

    number: int
    outcome: str
    injections: tuple[Injection, ...]
    error: str = ""
    site: Site | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values for JSON."""
        injections = [injection.to_dict() for injection in self.injections]
        return {**vars(self), "injections": injections, "site": self.site and self.site._asdict()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Trial:
        """Return the trial that `to_dict` described."""
        site = Site(**fields["site"]) if fields["site"] else None
        injections = tuple(map(Injection.from_dict, fields["injections"]))
        return cls(fields["number"], fields["outcome"], injections, fields["error"], site)


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
    # Not share +- z sqrt(p q / n), which gives an empty interval for 0 successes.
    middle = (share + square / (2 * trials)) / (1 + square / trials)
    half = z / (1 + square / trials) * sqrt(share * (1 - share) / trials + square / (4 * trials * trials))
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    return Rate(share, low, 1.0 if successes == trials else min(1.0, middle + half))


class CampaignResult(KeyedResult):
    """Counts of trials by outcome, for each type of op or other keys.

    by: the keys of a row, of `KEYS`.  A trial with several injections is in the row of each.
    Words of the campaign's `compare` have columns of their own, and count as corruptions in the SDC rate.
    """

    name: ClassVar[str] = "inject_campaign"
    keys: ClassVar[Sequence[str]] = KEYS

    def __init__(
        self, trials: Iterable[Trial], seed: int, sites: int, by: Sequence[str] = ("phase", "type")
    ) -> None:
        self.trials = tuple(trials)
        self.seed, self.sites = seed, sites
        words = sorted({trial.outcome for trial in self.trials}.difference(OUTCOMES))
        self._sdc = ("sdc", *words)
        self._outcomes = ("masked", *self._sdc, *COUNTED[2:])
        self._counted = (  # type: ignore[misc]
            *(Column(name, show="{:,}".format, number=True) for name in ("trials", *self._outcomes)),
            *(
                Column(name, show=lambda share: f"{100 * share:.1f} %", number=True, unit="share")
                for name in ("SDC rate", "low", "high")
            ),
        )
        self._set_keys(by, f"Outcomes of {len(self.trials):,} trials")

    def count(self, outcome: str) -> int:
        """Return the number of trials with an outcome; raise AmandaError for an unknown outcome."""
        if outcome not in (*self._outcomes, "no_fault"):
            raise AmandaError(f"{outcome!r} is no outcome; they are {', '.join(self._outcomes)}, no_fault")
        return sum(trial.outcome == outcome for trial in self.trials)

    def rate(self, *outcomes: str) -> Rate:
        """Return the share of these outcomes in the trials with faults."""
        trials_with_faults = len(self.trials) - self.count("no_fault")
        return wilson(sum(self.count(outcome) for outcome in outcomes), trials_with_faults)

    @property
    def sdc_rate(self) -> Rate:
        """The rate of silent data corruptions: "sdc", and words of the campaign's `compare`."""
        return self.rate(*self._sdc)

    @property
    def due_rate(self) -> Rate:
        """The rate of detected unrecoverable errors: "crash" and "hang"."""
        return self.rate("crash", "hang")

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each value of the keys, sorted, without the trials that had no fault."""
        groups: dict[tuple[str, ...], dict[int, Trial]] = {}
        for trial in self.trials:
            for place in trial.injections or filter(None, [trial.site]):
                groups.setdefault(_row_key(place, self._by), {})[trial.number] = trial
        rows = []
        for key in sorted(groups, key=lambda key: [_sort_key(part) for part in key]):
            outcomes = [trial.outcome for trial in groups[key].values()]
            counts = [outcomes.count(outcome) for outcome in self._outcomes]
            corruptions = sum(map(outcomes.count, self._sdc))
            rows.append((*key, len(outcomes), *counts, *wilson(corruptions, len(outcomes))))
        return rows

    def _facts(self) -> Mapping[str, Any]:
        """Return the rate of each outcome, and every trial with its injections."""
        rates = {outcome: self.rate(outcome)._asdict() for outcome in self._outcomes}
        trials = [trial.to_dict() for trial in self.trials]
        return {"seed": self.seed, "sites": self.sites, "rates": rates, "trials": trials}

    def notes(self) -> Sequence[str]:
        """Return sentences on the rates of all trials."""
        rates = "; ".join(
            f"{outcome} {self.rate(outcome)}" for outcome in self._outcomes if self.count(outcome)
        )
        notes = [
            f"Seed {self.seed}, {self.sites:,} executions of ops with tensors for faults.",
            f"Shares with 95 % confidence intervals (Wilson): {rates or 'no trial had a fault'}.",
        ]
        if unchanged := self.count("no_fault"):
            notes.append(f"No element changed in {unchanged:,} trials.")
        return notes


def _row_key(place: Injection | Site, by: Sequence[str]) -> tuple[str, ...]:
    """Return the values of keys; a site has no bits and no dtype."""
    bits = " ".join(map(str, getattr(place, "bits", ())))
    return tuple(bits if key == "bit" else getattr(place, key, "") for key in by)


def _sort_key(part: str) -> tuple[list[int], str]:
    """Return a sort key: bits by their positions, words by their letters."""
    numbers = part.split() if part.replace(" ", "").isdigit() else []
    return [int(number) for number in numbers], part
