"""Stacks, on which loops of version 1 put what the rounds of their gradients take off again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Stacks:
    """Tensors that are pushed on the stacks of some operations.

    read: names of the operations whose gradients read their own inputs or outputs off stacks. One stack
    serves all who want a tensor, so where routines change that, each keeps what its gradients need.
    """

    def __init__(self, ops: Sequence[Any], forward: Mapping[str, Any]) -> None:
        self._pushed = {}
        for op in ops:
            if op.type == "StackPushV2":
                self._pushed[self._stack(op.inputs[0])] = op.inputs[1]
        self.read = {
            found.name for op in ops if (found := forward.get(op.name)) is not None
            and any(self.captured(one) is not None for one in op.inputs)
        }  # fmt: skip

    def captured(self, tensor: Any) -> Any:
        """Return what a tensor was when it was pushed, if it is taken off a stack; else None."""
        if not self._pushed or tensor.op.type != "StackPopV2":
            return None
        return self._pushed.get(self._stack(tensor.op.inputs[0]))

    def _stack(self, handle: Any) -> str:
        """The stack of a handle, which in nested loops is itself taken off a stack."""
        while handle.op.type != "StackV2":
            held = self.captured(handle)
            if held is None and not handle.op.inputs:
                break
            handle = handle.op.inputs[0] if held is None else held
        return str(handle.op.name)
