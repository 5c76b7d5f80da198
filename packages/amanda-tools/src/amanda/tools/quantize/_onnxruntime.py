"""Quantisation in ONNX Runtime: which inputs of ops are quantised."""

from __future__ import annotations

import amanda
from amanda.errors import AmandaError

_ALONE = ("batch_norm", "embedding")


def describe(context: amanda.OpContext) -> None:
    """Write `operands`, positions of the inputs that may be quantised, and `recompute`."""
    if "operands" in context:
        return
    kind, count = context["type"], len(context.get_inputs())
    factors = 2 if kind == "linear" or kind.startswith("conv") else 1 if kind in _ALONE else count
    context["operands"] = list(range(min(factors, count)))
    try:
        context["recompute"] = context.get_computation()
    except AmandaError:
        context["recompute"] = None
