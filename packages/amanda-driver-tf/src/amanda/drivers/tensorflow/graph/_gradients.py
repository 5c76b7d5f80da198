"""The way of the gradients through a body: which tensors of backward operations they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from ._body import Body

_SOURCES = ("Placeholder", "PlaceholderWithDefault", "_Arg", "Arg")


class GradientEdges:
    """Gradients that enter and leave the backward operations of a body.

    groups: the backward operations of each forward operation, in order.
    """

    def __init__(self, body: Body, forward: Mapping[tf.Operation, tf.Operation]) -> None:
        self._body = body
        self._forward = forward
        self._order = {op: i for i, op in enumerate(body.ops)}
        self._entering: dict[tf.Operation, list[int]] = {}
        self._consumers: dict[tuple[tf.Operation, int], list[tf.Operation]] = {}
        self._readers: dict[tuple[tf.Operation, int], list[tuple[tf.Operation, int]]] = {}
        self._computing: dict[tf.Operation, dict[int, set[tf.Operation]]] = {}
        self.groups: dict[tf.Operation, list[tf.Operation]] = {}
        for op in body.ops if forward else ():
            if op in forward:
                self.groups.setdefault(forward[op], []).append(op)
                given = _is_given(op)
                entering = [
                    i for i, one in enumerate(op.inputs) if given or self._is_gradient(one, forward[op])
                ]
                if op.type == "ZerosLike":  # in the place of a gradient that nothing gives
                    self._entering[op] = []
                elif entering:
                    self._entering[op] = entering
            for i, tensor in enumerate(op.inputs):
                if tensor.op in self._entering:
                    self._consumers.setdefault(key(tensor), []).append(op)
                self._readers.setdefault(key(tensor), []).append((op, i))

    def readers(self, tensor: Any) -> list[tuple[tf.Operation, int]]:
        """The operations that read a tensor, and at which input."""
        return self._readers.get(key(tensor), [])

    def entering(self, op: tf.Operation) -> list[int]:
        """Positions of the inputs that are gradients."""
        return self._entering.get(op, [])

    def leaving(self, op: tf.Operation) -> list[int]:
        """Positions of the outputs that are gradients: none where none enters."""
        if op not in self._entering:
            return []
        return [i for i, tensor in enumerate(op.outputs) if is_differentiable(tensor)]

    def last(self, forward: tf.Operation) -> tf.Operation:
        """The last backward operation that a gradient enters; others may be where the values are made."""
        group = self.groups[forward]
        return next((op for op in reversed(group) if self.entering(op)), group[-1])

    def from_outside(self, op: tf.Operation) -> list[int]:
        """Positions of the inputs that are gradients of the forward operation's outputs.

        Where several operations read an output its gradient is a sum, whose parts are none.
        """
        if op.type == "AddN":
            return []
        own = self._forward[op]
        sources = {i: op.inputs[i].op for i in self.entering(op)}
        return [i for i, one in sources.items() if one.type == "AddN" or self._forward.get(one) is not own]

    def of_inputs(self, forward: tf.Operation) -> dict[int, Any]:
        """By position of a forward operation's input, the tensor that is its gradient.

        Told by which operation reads the gradient on, and by what it was computed from: gradients
        by one factor are computed from the others.
        """
        group = self._group(forward)
        made = [tensor for op in group for i in self.leaving(op)
                if self._goes_out(tensor := op.outputs[i], group)]  # fmt: skip
        inputs = {i: one for i, one in enumerate(forward.inputs) if is_differentiable(one)}
        scored = sorted(
            (
                (-self._score(tensor, inputs[i], group), j, i)
                for (j, tensor), i in product(enumerate(made), inputs)
                if tensor.shape.is_compatible_with(inputs[i].shape)
            ),
        )
        found: dict[int, Any] = {}
        taken: set[int] = set()
        for _, j, i in scored:
            if i not in found and j not in taken:
                found[i] = made[j]
                taken.add(j)
        return found

    def read_as(self, op: tf.Operation, index: int, positions: Sequence[int]) -> int:
        """Return which of several inputs of the forward operation, all one tensor, a backward one reads.

        One that reads the tensor as often reads them in order; one that computes the gradient by one of
        them reads another.
        """
        tensor = self._held(op.inputs[index])
        reads = [i for i, one in enumerate(op.inputs) if key(self._held(one)) == key(tensor)]
        if len(reads) >= len(positions):
            return positions[reads.index(index)]
        computed = self._computes(op)
        return next((i for i in positions if i not in computed), positions[0])

    def _computes(self, op: tf.Operation) -> list[int]:
        """Positions of the forward operation's inputs whose gradient an operation helps to compute."""
        forward = self._forward[op]
        if forward not in self._computing:
            group = self._group(forward)
            self._computing[forward] = {
                i: self._ancestors(gradient.op, group) for i, gradient in self.of_inputs(forward).items()
            }
        return [i for i, ancestors in self._computing[forward].items() if op in ancestors]

    @staticmethod
    def _ancestors(op: tf.Operation, group: Sequence[tf.Operation]) -> set[tf.Operation]:
        found: set[tf.Operation] = set()
        waiting = [op]
        while waiting:
            one = waiting.pop()
            if one in group and one not in found:
                found.add(one)
                waiting += [tensor.op for tensor in one.inputs]
        return found

    def _group(self, forward: tf.Operation) -> list[tf.Operation]:
        """The backward operations that compute gradients of inputs; sums come before or after them."""
        return [op for op in self.groups.get(forward, ()) if op.type != "AddN"]

    def _held(self, tensor: Any) -> Any:
        held = self._body.captured(tensor)
        return tensor if held is None else held

    def _goes_out(self, tensor: Any, group: Sequence[tf.Operation]) -> bool:
        readers = self._consumers.get(key(tensor), [])
        return not readers or any(reader not in group for reader in readers)

    def _score(self, gradient: Any, value: Any, group: Sequence[tf.Operation]) -> int:
        readers = [self._forward.get(one) for one in self._consumers.get(key(gradient), ())]
        alone = len(self.leaving(gradient.op)) == 1  # else they are in the order of the inputs
        return 4 * (value.op in readers) + (alone and key(value) not in self._reads(gradient.op, group))

    def _reads(self, op: tf.Operation, group: Sequence[tf.Operation]) -> set[Any]:
        """The forward tensors that a gradient is computed from, within its group."""
        return {key(self._held(tensor)) for one in self._ancestors(op, group) for tensor in one.inputs}

    def _is_gradient(self, tensor: Any, forward: tf.Operation) -> bool:
        made_by = tensor.op
        if made_by in self._entering:
            return is_differentiable(tensor)
        if made_by in self._forward or not is_differentiable(tensor):
            return False
        if self._body.captured(tensor) is not None:
            return False
        if key(tensor) in map(key, (*forward.inputs, *forward.outputs)):
            return False
        if made_by.graph is not forward.graph:
            return made_by.type in _SOURCES or _has_shape_of_output(tensor, forward)
        later = self._order.get(made_by, -1) > self._order.get(forward, -1)
        return later and _has_shape_of_output(tensor, forward)


def key(tensor: Any) -> tuple[tf.Operation, int]:
    """Return what tells a symbolic tensor from others."""
    return tensor.op, tensor.value_index


def _is_given(op: tf.Operation) -> bool:
    """Return True for an operation by which `tf.gradients` takes a gradient, as in branches of a cond."""
    return op.type == "Identity" and str(op.name).rpartition("/")[2].startswith("grad_ys_")


def _has_shape_of_output(tensor: Any, forward: tf.Operation) -> bool:
    return any(tensor.shape.is_compatible_with(output.shape) for output in forward.outputs)


def is_differentiable(tensor: Any) -> bool:
    """Return True if a tensor may be a gradient."""
    kind = tensor.dtype.base_dtype
    return bool(kind.is_floating or kind.is_complex or kind == tf.variant)
