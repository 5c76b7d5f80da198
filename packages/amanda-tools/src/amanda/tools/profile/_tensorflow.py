"""TensorFlow for the profile: how large tensors are."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import amanda

_SHARED = frozenset(
    {"ExpandDims", "Identity", "IdentityN", "Placeholder", "PlaceholderWithDefault", "PreventGradient",
     "ReadVariableOp", "Reshape", "Snapshot", "Squeeze", "StopGradient"}
)  # fmt: skip
"""Types of operations whose outputs are the memory of their inputs."""


_CALLS = frozenset(
    {"Case", "If", "MapDefun", "PartitionedCall", "RemoteCall", "StatefulPartitionedCall", "StatelessCase",
     "StatelessIf", "StatelessWhile", "SymbolicGradient", "While"}
)  # fmt: skip
"""Types of operations that run others, which have times of their own."""

_FLOW = frozenset(
    {"ControlTrigger", "Enter", "Exit", "LoopCond", "Merge", "NextIteration", "RefEnter", "RefExit",
     "RefMerge", "RefNextIteration", "RefSwitch", "Switch", "_SwitchN"}
)  # fmt: skip
"""Control flow of version 1, which passes values on."""


def roles(context: amanda.OpContext) -> None:
    """Write what the tool asks for in TensorFlow's terms."""
    kind = context.get_op_type() if context.is_forward() else str(context.get_backward_op().__name__)
    context["profile.phase"] = "forward"
    context["profile.bytes"] = _nothing if kind in _SHARED else nbytes
    context["profile.runs_others"] = kind in _CALLS
    context["profile.passes"] = kind in _FLOW


def in_graph(context: amanda.OpContext) -> None:
    """Write that ops run side by side."""
    context["profile.parallel"] = True


def nbytes(values: Iterable[Any]) -> int | None:
    """Bytes of tensors, also of those in lists; None where an extent is not known yet."""
    total = 0
    for value in values:
        if isinstance(value, (list, tuple)):
            size = nbytes(value)
        else:
            size = _size(value)
        if size is None:
            return None
        total += size
    return total


def _size(value: Any) -> int | None:
    shape = getattr(value, "shape", None)
    if shape is None or value.dtype.name in ("resource", "variant", "string"):
        return 0
    if shape.rank is None or None in shape.as_list():
        return None
    return int(prod(shape.as_list())) * int(value.dtype.base_dtype.size)


def _nothing(values: Iterable[Any]) -> int:
    return 0
