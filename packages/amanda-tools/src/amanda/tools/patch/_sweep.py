"""Sweeps: the metric with one intervention at each of many places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import amanda
from amanda.options import PositiveInt, checked
from amanda.tools.kit import check_number
from amanda.tools.patch._region import PatchError, Region
from amanda.tools.patch._result import PatchSweep
from amanda.tools.patch._tool import PatchTool


@checked(error=PatchError)
def patch_sweep(
    metric: Callable[[], Any],
    points: Sequence[str] | str | None = None,
    *,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    num_heads: PositiveInt | None = None,
    axis: int = 1,
    **options: Any,
) -> PatchSweep:
    """Return the metric with an intervention at one module at a time, and at one position or head of it.

    metric: function that runs the model and returns a number.  points: paths of modules, as of `PatchTool`.
    positions, heads: places within each module; None for the whole module.  options: of `PatchTool`, such as
    `set=clean`.
    Raises PatchError if both positions and heads are given, or if nothing is selected.
    """
    if positions is not None and heads is not None:
        raise PatchError("positions and heads are both given; a sweep varies one of them besides the modules")
    along = "positions" if positions else "heads" if heads else None
    others: Sequence[int | None] = positions or heads or [None]
    tool = PatchTool(points, **options)
    tool.only = frozenset()
    rows = []
    with amanda.apply(tool):
        baseline = check_number(metric(), metric, PatchError)
        names = [*dict.fromkeys(one.point for one in tool.result.patched)]
        for name in names:
            for other in others:
                positioned, headed = (other, None) if along == "positions" else (None, other)
                tool.only, tool.region = frozenset([name]), Region.of(positioned, headed, num_heads, axis)
                tool.clear()
                rows.append((name, other, check_number(metric(), metric, PatchError)))
    return PatchSweep(rows, along, baseline)
