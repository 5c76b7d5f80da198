"""The cost of one call of a model, in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import amanda
from amanda.options import PositiveInt, checked
from amanda.tools.flops._cost import FlopsResult
from amanda.tools.flops._tool import FlopsTool
from amanda.tools.results import Result


@checked
def count_flops(model: Callable[..., Any], /, *inputs: Any, **keywords: Any) -> FlopsResult:
    """Return the FLOPs, MACs, parameters and bytes of each op of one call of a model.

    inputs, keywords: of the call.  A function that also runs the backward pass is counted with it.

    count_flops(model, x).total()
    """
    flops = FlopsTool()
    with amanda.apply(flops):
        model(*inputs, **keywords)
    return flops.result


@checked
def summary(
    model: Callable[..., Any], /, *inputs: Any, depth: PositiveInt | None = None, **keywords: Any
) -> Result:
    """Return the parameters, MACs, FLOPs and share of each module in one call of a model, as a tree.

    inputs, keywords: of the call.  depth: levels of modules below the model; None for as many as a screen
    shows.

    print(summary(model, x, depth=2))
    """
    tree = count_flops(model, *inputs, **keywords).tree(depth)
    tree.title = type(model).__name__
    return tree
