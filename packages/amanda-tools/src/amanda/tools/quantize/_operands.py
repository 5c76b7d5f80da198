"""Mapping rules: positions of the inputs of ops that may be quantised, which leaves biases out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import amanda
from amanda.tools.mapping import MappingTool

_ALONE = {"batch_norm": (0,), "embedding": (0,)}
_BEFORE_BIAS = {**_ALONE, "conv": (0, 1), "linear": (0, 1)}
_OPERANDS: Mapping[str, Mapping[str, Sequence[int]]] = {
    "pytorch": {
        **_BEFORE_BIAS, "addmm": (1, 2), "baddbmm": (1, 2), "scaled_dot_product_attention": (0, 1, 2),
        "layer_norm": (0,), "group_norm": (0,),
    },
    "tensorflow": _ALONE,
    "onnxruntime": _BEFORE_BIAS,
}  # fmt: skip


def operands() -> MappingTool:
    """Return the rules that write `operands`: all inputs of an op whose type is in no table."""
    return MappingTool([[framework, partial(_write, found)] for framework, found in _OPERANDS.items()])


def _write(found: Mapping[str, Sequence[int]], context: amanda.OpContext) -> None:
    kind, count = context["type"], len(context.get_inputs())
    wanted = found.get("conv" if kind.startswith("conv") else kind, range(count))
    context["operands"] = [position for position in wanted if position < count]
