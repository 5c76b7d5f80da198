"""Constants applied to a sum afterwards: biases, scales, batch norms."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from amanda.tools.effective_path._terms import Indices, Numbers, Step, aligned
from amanda.tools.trace import Graph

_SAME = frozenset({"reshape", "squeeze", "unsqueeze", "identity", "Identity", "contiguous", "clone", "to"})
_SUMS = frozenset({"add", "sub", "rsub", "BiasAdd", "bias_add"})
AFFINE = _SUMS | {"mul", "div", "neg", "batch_norm"}
"""Words of ops that scale or shift what they read, where they read one tensor that varies."""


def folded(
    graph: Graph, steps: Mapping[int, Step], step: Step, rows: Indices, output: int
) -> tuple[Numbers, Numbers]:
    """The values that elements of an output have in the end, and by what they were scaled on the way.

    As long as nothing but one op with constants reads it, the sum and that op are one, as a convolution and
    the batch norm behind it are.
    """
    values = step.outputs[output].reshape(-1)[rows].astype(np.float64)
    scale, size, tensor = np.ones(len(rows)), step.outputs[output].size, step.op.outputs[output]
    while isinstance(tensor, int):
        readers = [index for index in graph.tensors[tensor].consumers if index in steps]
        reader = steps[readers[0]] if len(readers) == 1 else None
        if reader is None or len(reader.varying) != 1 or reader.outputs[0].size != size:
            break
        if reader.type not in _SAME:
            one = _factor(reader, rows)
            if one is None:
                break
            scale = scale * one
            values = reader.outputs[0].reshape(-1)[rows].astype(np.float64)
        tensor = reader.op.outputs[0]
    return values, scale


def _factor(step: Step, rows: Indices) -> Numbers | float | None:
    """By what an op scales elements; None of another op."""
    (position, _), shape = step.data, step.outputs[0].shape
    if step.type in _SUMS:
        return float(step.arguments.get("signs", (1, 1))[position])
    if step.type == "neg":
        return -1.0
    if step.type == "batch_norm":
        assert step.layout is not None
        channel = np.unravel_index(rows, shape)[step.layout.index("C")]
        scale: Numbers = step.arguments["scale"][channel]
        return scale
    if step.type == "mul" or (step.type == "div" and position == 0):
        other = np.asarray(step.inputs[1 - position], np.float64)
        by: Numbers = other.reshape(-1)[aligned(rows, shape, other.shape)]
        return by if step.type == "mul" else 1 / by
    return None
