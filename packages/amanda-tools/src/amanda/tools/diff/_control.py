"""Errors that a control of a run lets expect of each of its ops."""

from __future__ import annotations

import math

from amanda.tools.diff._comparison import RunComparison
from amanda.tools.diff._errors import Comparison, array_distance
from amanda.tools.diff._expected import LARGEST, Expected, explained_error
from amanda.tools.diff._matching import OpMatch
from amanda.tools.diff._run import Run
from amanda.tools.libraries import numpy as np


def expected_errors(run: Run, control: Run) -> Expected:
    """Return the relative error of each op of a run that another run of the program explains.

    The control of a run in a less precise type is the run in float64.  A fault of the run that comes with its
    precision, such as angles of a rotary embedding in bfloat16, is in the distance of the two as well.  So an
    op is expected to err at most as much as what it reads, or as its element type rounds, even where the
    distance is larger.
    """
    runs = run, control
    comparing = RunComparison(*runs, None)
    compared, _ = comparing.ops({})
    is_wider = any(comparison.dtypes[0] != comparison.dtypes[1] for _, comparison in compared)
    errors: dict[tuple[int, int], float] = {}
    largest = 0.0
    for pair, comparison in compared:
        match = comparing.matches[pair[0].op, pair[0].execution]
        error = _error_from_control(runs, match, comparison)
        # A dump lacks the gradients that a backward op reads: any error before it may be theirs.
        read = largest if comparison.phase == "backward" else _error_of_inputs(comparing, match)
        errors[pair[0].op, pair[0].execution] = (
            explained_error(error, comparison.dtypes[0], read) if is_wider else error
        )
        largest = max(largest, error)
    return Expected(errors, is_wider)


def _error_of_inputs(comparing: RunComparison, match: OpMatch) -> float:
    """Return the largest relative error of what an op reads; 0 for one that reads no tensor."""
    return max((comparing.agreement(pair)[1] for pair in comparing.matching.reads(match)), default=0.0)


def _error_from_control(runs: tuple[Run, Run], match: OpMatch, comparison: Comparison) -> float:
    """Return the relative error of an op from its control, of finite numbers alone.

    An overflow of the run says nothing of the numbers beside it.
    """
    if math.isfinite(comparison.relative):
        return min(comparison.relative, LARGEST)
    errors = []
    for pair in match.pairs:
        a, b = (run.array(entry) for run, entry in zip(runs, pair, strict=True))
        if a is None or b is None or a.shape != b.shape:
            return LARGEST
        finite = np.isfinite(a) & np.isfinite(b)
        errors.append(array_distance(a[finite], b[finite]).relative)
    return min(max(errors), LARGEST)
