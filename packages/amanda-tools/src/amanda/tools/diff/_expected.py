"""Errors that are expected of the ops of a run: what a control shows, as far as element types explain it."""

from __future__ import annotations

import math

from amanda.tools.diff._comparison import MARGIN, Expected, RunComparison
from amanda.tools.diff._errors import TOLERANCES, Comparison
from amanda.tools.diff._matching import OpMatch
from amanda.tools.diff._run import Run
from amanda.tools.kit import Tensors

_COARSE = TOLERANCES["bfloat16"]
"""Error up to which the rounding of several ops is taken for an explanation, also in more precise types."""


def expected_errors(run: Run, control: Run) -> Expected:
    """Return the relative error of each op of a run that another run of the program explains.

    The control of a run in a less precise type is the run in float64.  A fault of the run that comes with its
    precision, such as angles of a rotary embedding in bfloat16, is in the distance of the two as well.  So an
    op is expected to err at most as much as what it reads, or as its element type rounds, even where the
    distance is larger.
    """
    comparing = RunComparison(run, control, None)
    compared, _ = comparing.ops({})
    # By luck the distance from a wider control may be 0, but rounding is always expected.
    is_wider = any(comparison.dtypes[0] != comparison.dtypes[1] for _, comparison in compared)
    expected: dict[tuple[int, int], float] = {}
    largest = 0.0
    for pair, comparison in compared:
        error = comparison.relative
        if is_wider:
            # A dump lacks the gradients that a backward op reads: any error before it may be theirs.
            read = (
                largest
                if comparison.phase == "backward"
                else _error_of_inputs(comparing, comparing.matches[pair[0].op, pair[0].execution])
            )
            error = max(min(error, _explained(comparison, read)), _rounding(comparison.dtypes[0]))
        expected[pair[0].op, pair[0].execution] = error
        largest = max(largest, comparison.relative if math.isfinite(comparison.relative) else 0.0)
    return expected


def _error_of_inputs(comparing: RunComparison, match: OpMatch) -> float:
    """Return the largest relative error of what an op reads; 0 for one that reads no tensor."""
    return max((comparing.agreement(pair)[1] for pair in comparing.matching.reads(match)), default=0.0)


def _explained(comparison: Comparison, read: float) -> float:
    """Return the error of an op that its element type and the error of its inputs explain.

    Integers have no rounding: an index that two near values decide may be any other.
    """
    if comparison.dtypes[0] not in TOLERANCES:
        return math.inf
    return max(_COARSE, TOLERANCES[comparison.dtypes[0]], MARGIN * read) / MARGIN


def _rounding(dtype: str) -> float:
    """Return the root mean square of the relative error of rounding to an element type; 0 for integers."""
    if not dtype.startswith(("float", "bfloat")):
        return 0.0
    from ml_dtypes import finfo

    # Rounding errs by up to half a unit in the last place, evenly: the root mean square is 1/sqrt(12) of the
    # unit, a little below a quarter of it for a mantissa between 1 and 2.
    bits: int = finfo(Tensors.numpy_type(dtype)).nmant  # type: ignore[no-untyped-call]
    return float(2.0**-bits / 4)
