"""Campaigns: runs of one program, each with other faults."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import amanda
from amanda.errors import AmandaError
from amanda.options import NonNegativeInt, PositiveFloat, PositiveInt, Range, checked
from amanda.tools.inject._compare import Compare, arrays, differs, not_finite
from amanda.tools.inject._faults import InjectError
from amanda.tools.inject._memory import MemorySnapshot
from amanda.tools.inject._outcomes import CampaignResult, Outcome, Trial
from amanda.tools.inject._sites import Site
from amanda.tools.inject._tool import InjectTool
from amanda.tools.libraries import numpy as np

Program = Callable[[], Any]
Sample = Literal["ops", "elements", "all"]


class HangError(AmandaError):
    """A program with faults runs for much longer than without."""


class _Watch(amanda.Tool):
    """A tool that stops a program after more than `limit` ops or `timeout` seconds."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self.limit = float("inf")
        self.start()
        self.add_inst_for_op(lambda context: context.insert_before_op(self._look, inputs=[]))

    def start(self) -> None:
        self.executions, self.fired = 0, ""
        self._deadline = float("inf") if self._timeout is None else time.monotonic() + self._timeout

    def _look(self) -> None:
        self.executions += 1
        if self.executions > self.limit:
            self.fired = f"it executed more than {int(self.limit):,} ops"
        elif time.monotonic() > self._deadline:
            self.fired = f"it ran for more than {self._timeout} s"
        if self.fired:
            raise HangError(f"the program was stopped: {self.fired}")


class Campaign:
    """Trials of a program with faults that a tool injects, and their outcomes.

    tool: injects the faults; its seed and the number of a trial determine them.  trials: number of runs.
    compare: function of the output without faults and the output of a trial, which returns True for a
        corrupted output: `differs`, `differs_by(...)`, `top1_changed` or your own.  Outputs are NumPy arrays
        in the structure that the program returned.
    sample: "ops": each trial picks one execution of one op, all equally likely; "elements": with a likelihood
        proportional to the number of elements; "all": each execution can have faults, by the tool's options.
    hang_factor: stop a program that executes this many times the ops of the run without faults.
    timeout: stop a program after so many seconds.  Both are checked as ops begin, so a kernel that does not
        return is not stopped.  With None for both, ops that are not selected are not instrumented.

    Raises InjectError for options that are not valid.
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
        self._memory, self._watch = MemorySnapshot(), _Watch(timeout)
        self._tools = (tool,) if hang_factor is None and timeout is None else (tool, self._watch)

    @checked(error=InjectError)
    def run(self, program: Program) -> CampaignResult:
        """Run the program twice without faults, then once for each trial; return the outcomes.

        The program has to do the same at each call, random numbers included.  After each run the memory that
        existed before, such as parameters and buffers, is restored bit by bit.
        Raises InjectError for a program whose output varies, or in which no fault fits.
        """
        try:
            golden, sites = self._golden(program)
            trials = [self._trial(program, number, golden, sites) for number in range(self._trials)]
        finally:
            self._memory.clear()
        return CampaignResult(trials, self._tool.seed, len(sites))

    @checked(error=InjectError)
    def replay(self, program: Program, number: NonNegativeInt) -> Any:
        """Run the program with the faults of one trial; return its output, or raise its exception."""
        _, sites = self._golden(program)
        self._tool.try_at(number, self._site(number, sites))
        return self._run(program, self._memory.outlasting)

    def _golden(self, program: Program) -> tuple[Any, list[Site]]:
        """Return the output without faults, and the sites at which faults fit."""
        self._watch.limit = float("inf")
        self._memory.clear()
        with self._tool.calibrating():
            golden = self._run(program, arrays, self._memory)
        if self._hang_factor is not None:
            self._watch.limit = self._hang_factor * max(self._watch.executions, 100)
        sites = self._tool.sites
        if not sites:
            raise InjectError(
                "the program executes nothing in which a fault fits; " + " ".join(self._tool.result.notes())
            )
        with self._tool.calibrating():
            again = self._run(program, arrays)
        if self._compare(golden, again) or not_finite(golden, again):
            raise InjectError(
                "the program gives another output each time, also without faults; let it seed its random "
                "numbers and start from the same weights at each call"
            )
        return golden, sites

    def _site(self, number: int, sites: list[Site]) -> Site | None:
        if self._sample == "all":
            return None
        key = np.array([self._tool.seed, 0], np.uint64)
        counter = np.array([0, 0, number, 1 << 32], np.uint64)
        random = np.random.Generator(np.random.Philox(key=key, counter=counter))
        if self._sample == "ops":
            return sites[int(random.integers(len(sites)))]
        ends = np.cumsum([site.elements for site in sites])
        return sites[int(np.searchsorted(ends, random.integers(ends[-1]), side="right"))]

    def _trial(self, program: Program, number: int, golden: Any, sites: list[Site]) -> Trial:
        self._tool.try_at(number, self._site(number, sites))
        outcome, error = self._outcome(program, golden)
        injections = self._tool.result.injections
        return Trial(number, outcome if injections else "no_fault", injections, error)

    def _outcome(self, program: Program, golden: Any) -> tuple[Outcome, str]:
        raised = None
        try:
            output = self._run(program, arrays)
        except Exception as error:
            raised = error
        if self._watch.fired:
            return "hang", self._watch.fired
        if isinstance(raised, InjectError):
            raise raised
        if raised is not None:
            return "crash", f"{type(raised).__name__}: {raised}"
        if not_finite(golden, output):
            return "nan", ""
        return ("sdc" if self._compare(golden, output) else "masked"), ""

    def _run(self, program: Program, read: Callable[[Any], Any], *others: amanda.Tool) -> Any:
        """Run the program; return `read(output)`, computed before memory is restored."""
        self._watch.start()
        try:
            with amanda.apply(*others, *self._tools):
                output = program()
            return read(output)
        finally:
            self._memory.restore()
