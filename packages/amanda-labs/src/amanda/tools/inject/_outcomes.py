"""Outcomes of trials: comparisons of outputs, rates and their intervals, and the table of a campaign."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import sqrt
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

from amanda.errors import AmandaError
from amanda.options import NonNegativeFloat, NonNegativeInt, PositiveFloat, checked
from amanda.tools.inject._faults import InjectError, Injection, Site
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.libraries import tree_iter
from amanda.tools.results import Column, KeyedResult, count_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
    """Return a share with its score interval; (0, 0, 1) for no trials.  Source: Wilson 1927.

    Args:
        successes: Number of trials with the outcome.
        trials: Number of all trials.
        z: Quantile of the normal distribution; the default gives an interval of 95 %.

    Raises:
        InjectError: For more successes than trials.
    """
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
        self._set_keys(by, f"Outcomes of {count_of(len(self.trials), 'trial')}")

    def count(self, outcome: str) -> int:
        """Return the number of trials with an outcome.

        Args:
            outcome: Such as "masked", "crash" or "no_fault".

        Raises:
            AmandaError: For an unknown outcome.
        """
        if outcome not in (*self._outcomes, "no_fault"):
            raise AmandaError(f"{outcome!r} is no outcome; they are {', '.join(self._outcomes)}, no_fault")
        return sum(trial.outcome == outcome for trial in self.trials)

    def rate(self, *outcomes: str) -> Rate:
        """Return the share of these outcomes in the trials with faults.

        Args:
            *outcomes: Such as "sdc"; the shares of several are added.

        Raises:
            AmandaError: For an unknown outcome.
        """
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
        # By row, and by number: a trial with several injections of one key counts once in its row.
        trials_by_key: dict[tuple[str, ...], dict[int, Trial]] = {}
        for trial in self.trials:
            places = trial.injections or ([] if trial.site is None else [trial.site])
            for place in places:
                trials_by_key.setdefault(_row_key(place, self._by), {})[trial.number] = trial
        rows = []
        for key in sorted(trials_by_key, key=lambda key: [_sort_key(part) for part in key]):
            outcomes = [trial.outcome for trial in trials_by_key[key].values()]
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
            f"Seed {self.seed}, {count_of(self.sites, 'execution')} of ops with tensors for faults.",
            f"Shares with 95 % confidence intervals (Wilson): {rates or 'no trial had a fault'}.",
        ]
        if unchanged_count := self.count("no_fault"):
            notes.append(f"No element changed in {count_of(unchanged_count, 'trial')}.")
        return notes


def _row_key(place: Injection | Site, by: Sequence[str]) -> tuple[str, ...]:
    """Return the values of keys; a site has no bits and no dtype."""
    bits = " ".join(map(str, getattr(place, "bits", ())))
    return tuple(bits if key == "bit" else getattr(place, key, "") for key in by)


def _sort_key(part: str) -> tuple[list[int], str]:
    """Return a sort key: bits by their positions, words by their letters."""
    numbers = part.split() if part.replace(" ", "").isdigit() else []
    return [int(number) for number in numbers], part


Compare = Callable[[Any, Any], "bool | str"]
"""Function of the output without faults and that of a trial, from `arrays`; returns True for corruption, or a
word for an outcome of its own."""


def arrays(output: Any) -> Any:
    """Return a program's output, with each tensor or number copied to a NumPy array.

    Mappings become dicts, and lists and tuples lists; other objects are copied.
    """
    if isinstance(output, Mapping):
        return {key: arrays(value) for key, value in output.items()}
    if isinstance(output, (list, tuple)):
        return [arrays(value) for value in output]
    if isinstance(output, (bool, int, float, complex)):
        return np.array(output)
    if hasattr(output, "shape") and hasattr(output, "dtype"):
        # A copy: memory is restored after the run, and would change the output.
        return np.array(tensors_of(output).to_numpy(output))
    return copy.deepcopy(output)


def differs(golden: Any, output: Any) -> bool:
    """Return True if any number, shape or other object differs; NaN equals NaN, and 0.0 equals -0.0.

    Args:
        golden: Arrays of the run without faults.
        output: Arrays of the run with faults.
    """
    return not _all_agree(golden, output, _arrays_equal)


@checked(error=InjectError)
def differs_by(rtol: NonNegativeFloat = 1e-5, atol: NonNegativeFloat = 1e-8) -> Compare:
    """Return a comparison that is True if any number differs by more than `atol + rtol * abs(golden)`.

    As by `differs`, NaN equals NaN, and another shape or object is a difference.

    Args:
        rtol: Largest relative error that counts as equal.
        atol: Largest absolute error, besides.
    """

    def close(golden_array: NDArray[Any], array: NDArray[Any]) -> bool:
        return bool(np.allclose(array, golden_array, rtol, atol, equal_nan=True))

    return lambda golden, output: not _all_agree(golden, output, close)


def top1_changed(golden: Any, output: Any) -> bool:
    """Return True if the index of the largest number along the last axis of the first array has changed.

    Also True if a trial gave no array, or an array of another shape.

    Args:
        golden: Arrays of the run without faults.
        output: Arrays of the run with faults.

    Raises:
        InjectError: Where the run without faults gave no array.
    """
    # The first array is the answer of most models: logits come before caches and hidden states.
    golden_array, array = next(arrays_in(golden), None), next(arrays_in(output), None)
    if golden_array is None:
        raise InjectError("top1_changed compares arrays; the output of the program has none")
    if array is None or golden_array.shape != array.shape:
        return True
    return bool((golden_array.argmax(-1) != array.argmax(-1)).any())


def not_finite(golden: Any, output: Any) -> bool:
    """Return True if NaN or Inf replaces a finite number, or is in an array of another shape."""
    for golden_array, array in zip_longest(arrays_in(golden), arrays_in(output)):
        # A number that was not finite without the fault is not due to the fault.
        if array is not None and _can_hold_nan(array):
            is_new_nan_or_inf = ~np.isfinite(array)
            # With other shapes no element corresponds, so every NaN counts as new.
            if golden_array is not None and golden_array.shape == array.shape and _can_hold_nan(golden_array):
                is_new_nan_or_inf &= np.isfinite(golden_array)
            if is_new_nan_or_inf.any():
                return True
    return False


def _can_hold_nan(array: NDArray[Any]) -> bool:
    return array.dtype.kind in "fc"


def arrays_in(output: Any) -> Iterator[NDArray[Any]]:
    return (array for array in tree_iter(output) if isinstance(array, np.ndarray))


def _arrays_equal(golden: NDArray[Any], output: NDArray[Any]) -> bool:
    # NumPy raises for `equal_nan` with types that have no NaN, such as texts.
    return bool(np.array_equal(golden, output, equal_nan=_can_hold_nan(golden) and _can_hold_nan(output)))


def _all_agree(golden: Any, output: Any, agree: Callable[[Any, Any], bool]) -> bool:
    """Return True if two outputs have the same structure, and `agree` holds for all arrays."""
    if type(golden) is not type(output):
        return False
    if isinstance(golden, dict):
        return golden.keys() == output.keys() and all(
            _all_agree(golden[key], output[key], agree) for key in golden
        )
    if isinstance(golden, list):
        return len(golden) == len(output) and all(
            _all_agree(*pair, agree) for pair in zip(golden, output, strict=True)
        )
    if isinstance(golden, np.ndarray):
        return golden.shape == output.shape and agree(golden, output)
    # Objects that were copied deeply, such as texts and configurations.
    return bool(golden == output)
