"""Which inputs and outputs of a backward operation are gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from ._body import Body

_SOURCES = ("Placeholder", "PlaceholderWithDefault", "_Arg", "Arg")


class GradientEdges:
    """The way of the gradients through a body, asked for in the order of its operations."""

    def __init__(self, body: Body, forward: Mapping[tf.Operation, tf.Operation]) -> None:
        self._body = body
        self._forward = forward
        self._carriers: set[tf.Operation] = set()
        self._order = {op: i for i, op in enumerate(body.ops)}

    def entering(self, op: tf.Operation) -> list[int]:
        """Positions of the inputs that are gradients."""
        if op.type == "ZerosLike":  # in the place of a gradient that nothing gives
            self._carriers.add(op)
            return []
        found = [i for i, tensor in enumerate(op.inputs) if self._is_gradient(tensor, self._forward[op])]
        if found:
            self._carriers.add(op)
        return found

    def leaving(self, op: tf.Operation) -> list[int]:
        """Positions of the outputs that are gradients: none where none enters."""
        if op not in self._carriers:
            return []
        return [i for i, tensor in enumerate(op.outputs) if is_differentiable(tensor)]

    def _is_gradient(self, tensor: Any, forward: tf.Operation) -> bool:
        made_by = tensor.op
        if made_by in self._carriers:
            return is_differentiable(tensor)
        if made_by in self._forward or not is_differentiable(tensor):
            return False
        if self._body.captured(tensor) is not None:
            return False
        if any(one is tensor or (one.op is made_by and one.value_index == tensor.value_index)
               for one in (*forward.inputs, *forward.outputs)):  # fmt: skip
            return False
        if made_by.graph is not forward.graph:
            return made_by.type in _SOURCES or self._has_shape_of_output(tensor, forward)
        later = self._order.get(made_by, -1) > self._order.get(forward, -1)
        return later and self._has_shape_of_output(tensor, forward)

    @staticmethod
    def _has_shape_of_output(tensor: Any, forward: tf.Operation) -> bool:
        return any(tensor.shape.is_compatible_with(output.shape) for output in forward.outputs)


def is_differentiable(tensor: Any) -> bool:
    """Whether a tensor may be a gradient."""
    kind = tensor.dtype.base_dtype
    return bool(kind.is_floating or kind.is_complex or kind == tf.variant)
