"""The profile of a function, in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import amanda
from amanda.options import NonNegativeInt, PositiveInt, checked
from amanda.tools.profile._result import ProfileResult
from amanda.tools.profile._tool import ProfileTool


@checked
def profile(
    function: Callable[..., Any],
    *inputs: Any,
    warmup: NonNegativeInt = 1,
    calls: PositiveInt = 1,
    **keywords: Any,
) -> ProfileResult:
    """Return the time and memory of each op in calls of a function.

    inputs, keywords: of each call.  warmup: calls before, which are not in the result: the first ones also
    load kernels and fill caches.  calls: calls that are measured.

    print(profile(lambda: model(x).sum().backward()))
    """
    tool = ProfileTool()
    with amanda.apply(tool):
        for _ in range(warmup):
            function(*inputs, **keywords)
        tool.clear()
        for _ in range(calls):
            function(*inputs, **keywords)
    return tool.result
