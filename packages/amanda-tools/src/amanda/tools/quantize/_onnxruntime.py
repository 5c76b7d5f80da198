"""Quantisation in ONNX Runtime: which inputs of ops are quantised."""

from __future__ import annotations

import amanda


def describe(context: amanda.OpContext) -> None:
    """Write `operands`, positions of the inputs that may be quantised."""
    kind, count = context["type"], len(context.get_inputs())
    alone = kind in ("batch_norm", "embedding")
    most = 2 if kind == "linear" or kind.startswith("conv") else 1 if alone else count
    context["operands"] = range(min(most, count))
