"""Campaigns: runs of a program, each with different faults, and comparisons of their outputs."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import sqrt
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, get_args

import amanda
from amanda.errors import AmandaError
from amanda.options import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range, checked
from amanda.tools.inject._faults import InjectError, Injection, Site
from amanda.tools.inject._tool import InjectTool, MemorySnapshot
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.libraries import tree_iter
from amanda.tools.results import Column, KeyedResult

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
    # Not share +- z sqrt(p q / n), which gives an empty interval for 0 successes.
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
    _counted: ClassVar[Sequence[Column]] = (
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
        self._set_keys(by, f"Outcomes of {len(self.trials):,} trials")

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

    def _facts(self) -> Mapping[str, Any]:
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


Compare = Callable[[Any, Any], bool]
"""Function of the output without faults and that of a trial, from `arrays`; returns True for corruption."""


def arrays(output: Any) -> Any:
    """Return a program's output, with each tensor copied to a NumPy array.

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
    """Return True if any number differs; NaN equals NaN, and 0.0 equals -0.0."""
    return not _all_agree(golden, output, _arrays_equal)


@checked(error=InjectError)
def differs_by(rtol: NonNegativeFloat = 1e-5, atol: NonNegativeFloat = 1e-8) -> Compare:
    """Return a comparison that is True if any number differs by more than `atol + rtol * abs(golden)`."""

    def close(golden_array: NDArray[Any], array: NDArray[Any]) -> bool:
        return bool(np.allclose(array, golden_array, rtol, atol, equal_nan=True))

    return lambda golden, output: not _all_agree(golden, output, close)


def top1_changed(golden: Any, output: Any) -> bool:
    """Return True if the index of the largest number along the last axis of the first array has changed."""
    # The first array is the answer of most models: logits come before caches and hidden states.
    golden_array, array = next(_arrays_in(golden), None), next(_arrays_in(output), None)
    if golden_array is None:
        raise InjectError("top1_changed compares arrays; the output of the program has none")
    if array is None or golden_array.shape != array.shape:
        return True
    return bool((golden_array.argmax(-1) != array.argmax(-1)).any())


def not_finite(golden: Any, output: Any) -> bool:
    """Return True if NaN or Inf replaces a finite number."""
    for golden_array, array in zip_longest(_arrays_in(golden), _arrays_in(output)):
        # A number that was not finite without the fault is none of the fault's doing.
        if array is not None and _can_hold_nan(array):
            non_finite = ~np.isfinite(array)
            # With other shapes no element corresponds, so every NaN counts as new.
            if golden_array is not None and golden_array.shape == array.shape and _can_hold_nan(golden_array):
                non_finite &= np.isfinite(golden_array)
            if non_finite.any():
                return True
    return False


def _can_hold_nan(array: NDArray[Any]) -> bool:
    return array.dtype.kind in "fc"


def _arrays_in(output: Any) -> Iterator[NDArray[Any]]:
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


Program = Callable[[], Any]
Sample = Literal["ops", "elements", "all"]


class HangError(AmandaError):
    """A program with faults ran much longer than without."""


class _HangWatch(amanda.Tool):
    """Stop a program after more than `limit` ops or `timeout` seconds."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self.limit = float("inf")
        self.start()
        self.add_inst_for_op(lambda context: context.insert_before_op(self._check_limits, inputs=[]))

    def start(self) -> None:
        """Count ops from 0, and set the time at which the program is stopped."""
        self.executions, self.reason = 0, ""
        # The monotonic clock: the time of day may be set while a program runs.
        self._deadline = float("inf") if self._timeout is None else time.monotonic() + self._timeout

    def _check_limits(self) -> None:
        """Count an op; raise HangError beyond the limit of ops or of time."""
        self.executions += 1
        if self.executions > self.limit:
            self.reason = f"it executed more than {int(self.limit):,} ops"
        elif time.monotonic() > self._deadline:
            self.reason = f"it ran for more than {self._timeout} s"
        if self.reason:
            # An exception in a routine reaches the program's call, which ends the run as it would end a
            # crash.
            raise HangError(f"the program was stopped: {self.reason}")


class Campaign:
    """Run a program many times with faults, and classify the outcomes.

    Args:
        tool: Injects the faults; its seed and the number of a trial determine them.
        trials: Number of runs.
        compare: Function of the output without faults and the output of a trial; returns True for a corrupted
            output: `differs`, `differs_by(...)`, `top1_changed` or a function of yours.  Outputs are NumPy
            arrays in the structure that the program returned.
        sample: "ops": each trial picks one execution of one op, all equally likely; "elements": with a
            likelihood proportional to the number of elements; "all": each execution can have faults, by the
            tool's options.
        hang_factor: Stop a program that executes this many times the ops of the run without faults.
        timeout: Stop a program after so many seconds.  Both are checked as ops begin, so a kernel that does
            not return is not stopped.  With None for both, ops that are not selected are not instrumented.

    Raises:
        InjectError: For options that are not valid.
    """

    @checked(error=InjectError)
    def __init__(
        self,
        tool: InjectTool,
        trials: PositiveInt = 100,
        compare: Compare = differs,
        sample: Sample = "ops",
        hang_factor: Annotated[float, Range(above=1)] | None = 10.0,
        timeout: PositiveFloat | None = None,
    ) -> None:
        self._tool, self._trials, self._compare, self._sample = tool, trials, compare, sample
        self._hang_factor = hang_factor
        self._memory, self._watch = MemorySnapshot(), _HangWatch(timeout)
        # Without limits ops that are not selected run with no routine.
        self._tools = (tool,) if hang_factor is None and timeout is None else (tool, self._watch)

    @checked(error=InjectError)
    def run(self, program: Program) -> CampaignResult:
        """Run the program twice without faults, then once for each trial; return the outcomes.

        The program has to do the same at each call, with the same random numbers.  After each run the memory
        that existed before, such as parameters and buffers, is restored bit by bit.
        Raises InjectError for a program whose output varies, or without a tensor for the fault.
        """
        try:
            golden, sites = self._run_without_faults(program)
            trials = [self._run_trial(program, number, golden, sites) for number in range(self._trials)]
        finally:
            self._memory.clear()
        return CampaignResult(trials, self._tool.seed, len(sites))

    @checked(error=InjectError)
    def replay(self, program: Program, number: NonNegativeInt) -> Any:
        """Run the program with the faults of one trial; return its output, or raise its exception."""
        _, sites = self._run_without_faults(program)
        self._tool.try_at(number, self._draw_site(number, sites))
        return self._run_restoring(program, self._memory.outlasting)

    def _run_without_faults(self, program: Program) -> tuple[Any, list[Site]]:
        """Return the output without faults, and the sites at which faults fit."""
        self._watch.limit = float("inf")
        self._memory.clear()
        with self._tool.calibrating():
            # The snapshot learns which memory the program reads; later runs restore the same memory.
            golden = self._run_restoring(program, arrays, self._memory)
        if self._hang_factor is not None:
            # A very short program may execute some ops more, for one branch, without hanging.
            self._watch.limit = self._hang_factor * max(self._watch.executions, 100)
        sites = self._tool.sites
        if not sites:
            raise InjectError(
                "no op of the program has a tensor for this fault; " + " ".join(self._tool.result.notes())
            )
        with self._tool.calibrating():
            # A program that differs by itself would count as corrupted in every trial.
            second_output = self._run_restoring(program, arrays)
        if self._compare(golden, second_output) or not_finite(golden, second_output):
            raise InjectError(
                "the output of the program varies without faults; let the program seed its random numbers "
                "and start from the same weights at each call"
            )
        return golden, sites

    def _draw_site(self, number: int, sites: list[Site]) -> Site | None:
        """Return the random site of a trial; None for all sites."""
        if self._sample == "all":
            return None
        key = np.array([self._tool.seed, 0], np.uint64)
        # Philox is a counter: every trial has its own numbers, whichever trials run before.  The tool's own
        # draws have the target in the last place, below 2**32, so these never coincide.
        counter = np.array([0, 0, number, 1 << 32], np.uint64)
        random = np.random.Generator(np.random.Philox(key=key, counter=counter))
        if self._sample == "ops":
            return sites[int(random.integers(len(sites)))]
        # A uniform number below the sum falls into a site in proportion to its elements.
        cumulative_sizes = np.cumsum([site.elements for site in sites])
        return sites[
            int(np.searchsorted(cumulative_sizes, random.integers(cumulative_sizes[-1]), side="right"))
        ]

    def _run_trial(self, program: Program, number: int, golden: Any, sites: list[Site]) -> Trial:
        """Run the program with the faults of one trial, and return its outcome."""
        self._tool.try_at(number, self._draw_site(number, sites))
        outcome, error = self._classify_run(program, golden)
        injections = self._tool.result.injections
        # A fault that changed nothing, as with probability, says nothing of the program.
        return Trial(number, outcome if injections else "no_fault", injections, error)

    def _classify_run(self, program: Program, golden: Any) -> tuple[Outcome, str]:
        """Run the program with faults; return the outcome, and the error of a crash or hang."""
        exception = None
        try:
            output = self._run_restoring(program, arrays)
        except Exception as error:
            exception = error
        # First: a program may turn the watch's exception into another one.
        if self._watch.reason:
            return "hang", self._watch.reason
        # A mistake in the campaign's options is not a crash of the program.
        if isinstance(exception, InjectError):
            raise exception
        if exception is not None:
            return "crash", f"{type(exception).__name__}: {exception}"
        # NaN is told apart from other corruption, as a program can detect it.
        if not_finite(golden, output):
            return "nan", ""
        return ("sdc" if self._compare(golden, output) else "masked"), ""

    def _run_restoring(self, program: Program, read_output: Callable[[Any], Any], *tools: amanda.Tool) -> Any:
        """Run the program; return `read_output(output)`, computed before memory is restored."""
        self._watch.start()
        try:
            with amanda.apply(*tools, *self._tools):
                output = program()
            return read_output(output)
        finally:
            # Also after an exception: the next trial starts from the same weights.
            self._memory.restore()
