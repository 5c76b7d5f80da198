"""Campaigns: runs of a program, each with different faults, and comparisons of their outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from functools import partial
from hashlib import sha256
from itertools import zip_longest
from os import PathLike
from typing import Annotated, Any, Literal

import amanda
from amanda.action import routine_name
from amanda.errors import AmandaError
from amanda.options import NonNegativeInt, PositiveFloat, PositiveInt, Range, checked
from amanda.tools.inject._faults import InjectError, Site
from amanda.tools.inject._outcomes import (
    OUTCOMES,
    CampaignResult,
    Compare,
    Trial,
    arrays,
    arrays_in,
    differs,
    not_finite,
    wilson,
)
from amanda.tools.inject._tool import InjectTool, MemorySnapshot
from amanda.tools.libraries import numpy as np
from amanda.tools.trials import Progress, TrialFile, run_trials

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
        """Count an op; raise HangError beyond the limit of ops or of time, and keep the reason."""
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
            arrays in the structure that the program returned.  A function may also return a word, such as
            "top5", which is the outcome of the trial: a class of silent data corruption, or "masked".
        sample: "ops": each trial picks one execution of one op, all equally likely; "elements": with a
            likelihood proportional to the number of elements; "all": each execution can have faults, by the
            tool's options.
        hang_factor: Stop a program that executes this many times the ops of the run without faults.
        timeout: Stop a program after so many seconds.  Both are checked as ops begin, so a kernel that does
            not return is not stopped.  With None for both, ops that are not selected are not instrumented.
        margin: Margin of error, below 0.5: run no further trials once the ends of the SDC rate's 95 %
            interval lie at most twice this share apart.  The trials count in the order of their numbers.
        progress: True for a progress bar on stderr, lines in a file.

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
        margin: Annotated[float, Range(above=0, below=0.5)] | None = None,
        progress: bool = True,
    ) -> None:
        self._tool, self._trial_count, self._compare, self._sample = tool, trials, compare, sample
        self._hang_factor, self._timeout = hang_factor, timeout
        self._margin, self._progress = margin, progress
        self._memory, self._hang_watch = MemorySnapshot(), _HangWatch(timeout)
        # Without limits ops that are not selected run with no routine.
        self._tools = (tool,) if hang_factor is None and timeout is None else (tool, self._hang_watch)
        self._trial_by_number: dict[int, Trial] = {}  # of the last run, as far as they have ended
        self._sites: list[Site] = []
        self._counted_trials = trials  # those with a lower number are in the result

    @property
    def result(self) -> CampaignResult:
        """The trials of the last `run` so far."""
        trials = [
            trial for number, trial in sorted(self._trial_by_number.items()) if number < self._counted_trials
        ]
        return CampaignResult(trials, self._tool.seed, len(self._sites))

    @checked(error=InjectError)
    def run(
        self, program: Program, jobs: int | None = None, resume: str | PathLike[str] | None = None
    ) -> CampaignResult:
        """Run the program twice without faults, then once for each trial; return the outcomes.

        The program has to do the same at each call, with the same random numbers.  After each run the memory
        that existed before, such as parameters and buffers, is restored bit by bit.
        On KeyboardInterrupt `result` has the trials that ended before.

        Args:
            program: Function that runs the model and returns its output.  For several processes it is
                pickled with all that it refers to; `trials.PerProcess` makes it in each process instead.
            jobs: Number of processes, as joblib's `n_jobs`; the outcomes are the same for any number.  None
                for one, or those of `joblib.parallel_config`.
            resume: File that keeps trials as they end.  Trials in the file do not run again.

        Raises:
            InjectError: For a program whose output varies, that executes other ops in another process, or
                without a tensor for the fault, and for a `compare` that raises or returns "crash", ...
            ArtefactError: For a file of another campaign.
        """
        self._trial_by_number, self._sites, self._counted_trials = {}, [], self._trial_count
        try:
            golden, self._sites = self._run_without_faults(program)
            with self._trial_file(resume, golden) as file, Progress(self._progress) as progress:
                self._run_trials(_TrialLoader(self, program, golden, self._sites), jobs, file, progress)
        finally:
            self._memory.clear()
        return self.result

    def _run_trials(
        self, load: _TrialLoader, jobs: int | None, file: TrialFile | None, progress: Progress
    ) -> None:
        """Run the trials that are not in the file, until all have ended or the interval is narrow enough.

        Each is added to the file and to the progress.  With a narrow interval `result` has no later trials.
        """
        records = {} if file is None else file.records
        trials_in_file = map(Trial.from_dict, records.values())
        # The file may be of a run with more trials.
        self._trial_by_number = {
            trial.number: trial for trial in trials_in_file if trial.number < self._trial_count
        }
        goal = _PrecisionGoal(self._margin)
        numbers = [number for number in range(self._trial_count) if number not in self._trial_by_number]
        progress.begin(self._trial_count, "trials", self._trial_count - len(numbers))
        with closing(run_trials(load, numbers, jobs)) as outcomes:
            while not goal.is_reached(self._trial_by_number):
                outcome = next(outcomes, None)
                if outcome is None:
                    return
                trial = outcome.value or self._crashed_trial(outcome.trial, outcome.error)
                self._trial_by_number[trial.number] = trial
                if file is not None:
                    file.add(str(trial.number), trial.to_dict())
                text = f"SDC rate {self.result.sdc_rate}"
                progress.advance(len(self._trial_by_number), self._trial_count, "trials", text)
        self._counted_trials = goal.counted_trials

    def _crashed_trial(self, number: int, error: str) -> Trial:
        """Return the outcome of a trial whose process ended, and took the injections along."""
        return Trial(number, "crash", (), error, self._draw_site(number, self._sites))

    def _trial_file(self, path: str | PathLike[str] | None, golden: Any) -> Any:
        """Return a context of the file that keeps trials, or of None without a path.

        The file belongs to the options, the program and its output.
        """
        if path is None:
            return nullcontext()
        options = {
            **self._tool.options(), "sample": self._sample, "compare": routine_name(self._compare),
            "hang_factor": self._hang_factor, "timeout": self._timeout, "sites": _digest(self._sites),
            "output": _digest([(array.shape, array.tobytes()) for array in arrays_in(golden)]),
        }  # fmt: skip
        return TrialFile(path, "inject_campaign", options)

    @checked(error=InjectError)
    def replay(self, program: Program, number: NonNegativeInt) -> Any:
        """Run the program with the faults of one trial; return its output, or raise its exception.

        Before, the program runs twice without faults, as by `run`; afterwards the memory is restored.

        Args:
            program: Function that the campaign ran.
            number: Number of the trial, from 0.
        """
        _, sites = self._run_without_faults(program)
        self._tool.try_at(number, self._draw_site(number, sites))
        return self._run_restoring(program, self._memory.outlasting)

    def _run_without_faults(self, program: Program) -> tuple[Any, list[Site]]:
        """Run twice without faults; return the output, and the sites at which faults fit.

        Saves the memory that later runs restore, and sets the limit of executions from which on a run hangs.
        Raises InjectError where no op has a tensor for the fault, and where the outputs differ.
        """
        self._hang_watch.limit = float("inf")
        self._memory.clear()
        with self._tool.calibrating():
            # The snapshot learns which memory the program reads; later runs restore the same memory.
            golden = self._run_restoring(program, arrays, self._memory)
        if self._hang_factor is not None:
            # A very short program may execute some ops more, for one branch, without hanging.
            self._hang_watch.limit = self._hang_factor * max(self._hang_watch.executions, 100)
        sites = self._tool.sites
        if not sites:
            raise InjectError(
                "no op of the program has a tensor for this fault; " + " ".join(self._tool.result.notes())
            )
        with self._tool.calibrating():
            # A program that differs by itself would count as corrupted in every trial.
            second_output = self._run_restoring(program, arrays)
        if self._is_corrupted(golden, second_output):
            raise InjectError(
                "the output of the program varies without faults; let the program seed its random numbers "
                "and start from the same weights at each call"
            )
        return golden, sites

    def _is_corrupted(self, golden: Any, output: Any) -> bool:
        """Return True if an output is corrupted according to `compare`, or has new NaN or Inf."""
        return self._compare(golden, output) not in (False, "masked") or not_finite(golden, output)

    def load(self, program: Program, golden: Any, sites: list[Site]) -> list[Site]:
        """Run the program without faults in another process; return its sites.

        The tool's ops then draw and list faults by the ids of the first process.

        Args:
            program: The program, as this process has it.
            golden: Output without faults in the process that started the campaign.
            sites: Sites in that process.

        Raises:
            InjectError: For another output or other ops.
        """
        other_golden, other_sites = self._run_without_faults(program)
        differences = [
            f"{_site_text(other_site)} instead of {_site_text(site)}"
            for site, other_site in zip_longest(sites, other_sites)
            if site is None
            or other_site is None
            or _facts_in_all_processes(site) != _facts_in_all_processes(other_site)
        ]
        if differences:
            raise InjectError(
                f"in another process the program executes other ops: {differences[0]}; give a program that "
                "does the same in each process, such as PerProcess(make), or jobs=1"
            )
        if self._is_corrupted(golden, other_golden):
            raise InjectError(
                "in another process the output of the program without faults is another; let the program "
                "seed its random numbers, give processes the same number of threads, and send a module whose "
                "model has changed by cloudpickle.register_pickle_by_value(module); or give jobs=1"
            )
        pairs = zip(sites, other_sites, strict=True)
        self._tool.op_names = {other_site.op: site.op for site, other_site in pairs}
        return other_sites

    def copied(self) -> Campaign:
        """Return a campaign with the same tool and options for another process; without `margin`."""
        return Campaign(
            self._tool, self._trial_count, self._compare, self._sample, self._hang_factor, self._timeout
        )

    def _draw_site(self, number: int, sites: list[Site]) -> Site | None:
        """Return the random site of a trial, which its number and the seed determine; None for all sites."""
        if self._sample == "all":
            return None
        key = np.array([self._tool.seed, 0], np.uint64)
        # Philox is a counter: every trial has its own numbers, whichever trials run before.  The tool's own
        # draws have the target in the last place, below 2**32, so these never coincide.
        counter = np.array([0, 0, number, 1 << 32], np.uint64)
        random = np.random.Generator(np.random.Philox(key=key, counter=counter))
        if self._sample == "ops":
            return sites[int(random.integers(len(sites)))]
        # A random element of all sites together lies in a site in proportion to the site's elements.
        ends = np.cumsum([site.elements for site in sites])
        element = random.integers(ends[-1])
        return sites[int(np.searchsorted(ends, element, side="right"))]

    def run_trial(self, program: Program, golden: Any, sites: list[Site], number: int) -> Trial:
        """Run the program with the faults of one trial, and return its outcome.

        Args:
            program: Function that computes the output.
            golden: Output without faults.
            sites: Sites of which the trial draws one, as `load` returns them.
            number: Number of the trial, which with the seed determines the faults.

        Raises:
            InjectError: For a mistake in the options, such as a `compare` that raises.
        """
        self._tool.try_at(number, self._draw_site(number, sites))
        outcome, error = self._classify_run(program, number, golden)
        injections = self._tool.result.injections
        # A fault that changed nothing, as with probability, says nothing of the program.
        return Trial(number, outcome if injections else "no_fault", injections, error)

    def _classify_run(self, program: Program, number: int, golden: Any) -> tuple[str, str]:
        """Run the program with faults; return the outcome, and the error of a crash or hang, or "".

        An InjectError is raised: a mistake in the campaign's options is not a crash of the program.
        """
        exception = None
        try:
            output = self._run_restoring(program, arrays)
        except Exception as error:
            exception = error
        # First: a program may turn the watch's exception into another one.
        if self._hang_watch.reason:
            return "hang", self._hang_watch.reason
        if isinstance(exception, InjectError):
            raise exception
        if exception is not None:
            return "crash", f"{type(exception).__name__}: {exception}"
        # NaN is told apart from other corruption, as a program can detect it.
        if not_finite(golden, output):
            return "nan", ""
        return self._compare_outputs(golden, output, number), ""

    def _compare_outputs(self, golden: Any, output: Any, number: int) -> str:
        """Return the outcome of a trial by the function `compare`.

        Raises InjectError where that raises an exception, or returns "" or a word for another outcome.
        """
        try:
            answer = self._compare(golden, output)
        except InjectError:
            raise
        except Exception as error:
            # An exception of a trial would count as a crash of the program.
            reason = f"{type(error).__name__}: {error}"
            raise InjectError(
                f"compare, {routine_name(self._compare)}, raised at trial {number}: {reason}"
            ) from error
        if not isinstance(answer, str):
            return "sdc" if answer else "masked"
        if not answer or answer in OUTCOMES[2:]:
            raise InjectError(
                f"compare, {routine_name(self._compare)}, returned {answer!r}; give True or False, or a word "
                f"that is none of {', '.join(OUTCOMES[2:])}"
            )
        return answer

    def _run_restoring(self, program: Program, read_output: Callable[[Any], Any], *tools: amanda.Tool) -> Any:
        """Run the program under the campaign's tools and further ones, then restore the memory.

        Returns `read_output(output)`, computed before memory is restored.
        """
        self._hang_watch.start()
        try:
            with amanda.apply(*tools, *self._tools):
                output = program()
            return read_output(output)
        finally:
            # Also after an exception: the next trial starts from the same weights.
            self._memory.restore()


class _TrialLoader:
    """Returns the function that runs a trial; in another process, after runs without faults there."""

    def __init__(self, campaign: Campaign, program: Program, golden: Any, sites: list[Site]) -> None:
        self._campaign, self._program, self._golden, self._sites = campaign, program, golden, sites
        self._is_loaded = True

    def __getstate__(self) -> dict[str, Any]:
        """Return what travels to another process: options, without the memory of this process."""
        return {**vars(self), "_campaign": self._campaign.copied(), "_is_loaded": False}

    def __call__(self) -> Callable[[int], Trial]:
        if not self._is_loaded:
            self._sites = self._campaign.load(self._program, self._golden, self._sites)
        return partial(self._campaign.run_trial, self._program, self._golden, self._sites)


class _PrecisionGoal:
    """A goal that is reached once the interval of the SDC rate is narrow enough; never without a margin.

    Trials count in the order of their numbers, so that the answer is the same whichever ends first.
    """

    def __init__(self, margin: float | None) -> None:
        self._margin = margin
        self.counted_trials = self._trials_with_faults = self._corruptions = 0

    def is_reached(self, trial_by_number: Mapping[int, Trial]) -> bool:
        """Count the trials that have ended, up to the first that has not; return True if these are enough."""
        while self._margin is not None:
            rate = wilson(self._corruptions, self._trials_with_faults)
            if rate.high - rate.low <= 2 * self._margin:
                return True
            if self.counted_trials not in trial_by_number:
                return False
            outcome = trial_by_number[self.counted_trials].outcome
            self.counted_trials += 1
            if outcome != "no_fault":
                self._trials_with_faults += 1
            if outcome not in _NO_CORRUPTION:
                self._corruptions += 1
        return False


_NO_CORRUPTION = {"masked", "nan", "crash", "hang", "no_fault"}


def _facts_in_all_processes(site: Site) -> tuple[Any, ...]:
    """Return the facts of a site that are the same in all processes.

    Ids of ops count the models that a process has seen, and the same source may lie in another folder.
    """
    return site.execution, site.elements, site.phase, site.type, site.module


def _site_text(site: Site | None) -> str:
    """Return a site in words."""
    if site is None:
        return "none"
    return f"{site.type} of {site.module or 'no module'} ({site.elements:,} elements)"


def _digest(value: Any) -> str:
    """Return a short text that differs for other values."""
    return sha256(repr(value).encode()).hexdigest()[:16]
