"""Stacks, onto which loops of version 1 push tensors that their loops of gradients pop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Stacks:
    """The tensors that operations push onto stacks.

    read: names of the forward operations whose gradients pop their inputs or outputs off stacks.
    """

    # A tensor has one stack for all its readers. So where a routine changes the tensor for one reader, that
    # reader keeps the changed value for its gradients itself.

    def __init__(self, ops: Sequence[Any], forward: Mapping[str, Any]) -> None:
        self._pushed = {}
        for op in ops:
            if op.type == "StackPushV2":
                self._pushed[self._stack(op.inputs[0])] = op.inputs[1]
        self.read = {
            forward_op.name for op in ops if (forward_op := forward.get(op.name)) is not None
            and any(self.captured(tensor) is not None for tensor in op.inputs)
        }  # fmt: skip

    def captured(self, tensor: Any) -> Any:
        """Return the tensor that was pushed, for a tensor that is popped off a stack; else None."""
        if not self._pushed or tensor.op.type != "StackPopV2":
            return None
        return self._pushed.get(self._stack(tensor.op.inputs[0]))

    def _stack(self, handle: Any) -> str:
        """Return the name of the stack of a handle, which in nested loops is itself popped off a stack."""
        while handle.op.type != "StackV2":
            pushed = self.captured(handle)
            if pushed is None and not handle.op.inputs:
                break
            handle = handle.op.inputs[0] if pushed is None else pushed
        return str(handle.op.name)
