"""Errors that are expected of the ops of a run, and what rounding and the errors of inputs explain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from amanda.tools.diff._errors import TOLERANCES
from amanda.tools.dump import Entry
from amanda.tools.kit import Tensors

MARGIN = 10.0
"""How many times the expected error agrees: another order of summation may round a few times as much."""
LARGEST = 1.0
"""Largest error that is expected: with it nothing of a tensor is right."""
_COARSE = TOLERANCES["bfloat16"]
"""Error up to which the rounding of several ops is taken for an explanation, also in more precise types."""


@dataclass(frozen=True)
class Expected:
    """Relative errors that a control shows of the ops of run a.

    errors: by an op's index and its execution; at most `LARGEST`.  is_wider: True for a control in a more
    precise type, whose distance from run a is more than the noise of a run.
    """

    errors: Mapping[tuple[int, int], float]
    is_wider: bool

    def error(self, entry: Entry, read_error: float = math.inf) -> float | None:
        """Return the error that is expected of a tensor of run a; None for an op that the control lacks.

        read_error: how far what its op reads is off between the runs that are compared; inf where that is
        unknown.
        """
        error = self.errors.get((entry.op, entry.execution))
        if error is None or not self.is_wider:
            return error
        # Inputs that are equal in both runs explain no difference, however far they are from the control.
        return explained_error(error, entry.dtype, read_error)


def explained_error(error: float, dtype: str, read_error: float) -> float:
    """Return how much of an error the element type and the error of inputs explain; at least rounding.

    Integers have no rounding.  An index that two near values decide may be any other.
    """
    if dtype in TOLERANCES:
        explained = max(_COARSE, TOLERANCES[dtype], MARGIN * read_error) / MARGIN
    else:
        explained = math.inf if read_error else 0.0
    # By luck the distance from a wider control may be 0, but rounding is always expected.
    return max(min(error, explained), _rounding(dtype))


def _rounding(dtype: str) -> float:
    """Return the root mean square of the relative error of rounding to an element type; 0 for integers."""
    if not dtype.startswith(("float", "bfloat")):
        return 0.0
    from ml_dtypes import finfo

    # Rounding errs by up to half a unit in the last place, evenly: the root mean square is 1/sqrt(12) of the
    # unit, a little below a quarter of it for a mantissa between 1 and 2.
    bits: int = finfo(Tensors.numpy_type(dtype)).nmant  # type: ignore[no-untyped-call]
    return float(2.0**-bits / 4)
