"""The gradients in a graph: inputs and outputs of backward operations, and operations that pass them on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from ._body import Body
    from ._rewrite import BodyRewriter

_PLACEHOLDERS = ("Placeholder", "PlaceholderWithDefault", "_Arg", "Arg")


class GradientEdges:
    """Finds which tensors that backward operations of a graph read and compute are gradients, and of what.

    backward_ops: the backward operations of each forward operation, in order.
    """

    def __init__(self, body: Body, forward_by_op: Mapping[tf.Operation, tf.Operation]) -> None:
        self._body = body
        self._forward_by_op = forward_by_op
        self._position_by_op = {op: i for i, op in enumerate(body.ops)}
        self._gradient_positions_by_op: dict[tf.Operation, list[int]] = {}
        self._readers_by_gradient: dict[tuple[tf.Operation, int], list[tf.Operation]] = {}
        self._reads_by_tensor: dict[tuple[tf.Operation, int], list[tuple[tf.Operation, int]]] = {}
        self._ancestors_by_input_of: dict[tf.Operation, dict[int, set[tf.Operation]]] = {}
        self.backward_ops: dict[tf.Operation, list[tf.Operation]] = {}
        if not forward_by_op:  # as in most bodies, which need none of these tables
            return
        for op in body.ops:
            if op in forward_by_op:
                self.backward_ops.setdefault(forward_by_op[op], []).append(op)
                self._record_gradient_inputs(op)
            for i, tensor in enumerate(op.inputs):
                if tensor.op in self._gradient_positions_by_op:
                    self._readers_by_gradient.setdefault(tensor_key(tensor), []).append(op)
                self._reads_by_tensor.setdefault(tensor_key(tensor), []).append((op, i))

    def _record_gradient_inputs(self, op: tf.Operation) -> None:
        """Record which inputs of a backward operation are gradients, if any; called in their order."""
        # Zeros stand for a gradient that no operation computes: their output is one, and their input is none.
        if op.type == "ZerosLike":
            self._gradient_positions_by_op[op] = []
            return
        receives_gradient = _receives_gradient(op)
        positions = [
            i
            for i, tensor in enumerate(op.inputs)
            if receives_gradient or self._is_gradient(tensor, self._forward_by_op[op])
        ]
        if positions:
            self._gradient_positions_by_op[op] = positions

    def readers(self, tensor: Any) -> list[tuple[tf.Operation, int]]:
        """Return the operations that read a tensor, each with the position of the input."""
        return self._reads_by_tensor.get(tensor_key(tensor), [])

    def gradient_inputs(self, op: tf.Operation) -> list[int]:
        """Return the positions of the inputs that are gradients; empty if there are none."""
        return self._gradient_positions_by_op.get(op, [])

    def gradient_outputs(self, op: tf.Operation) -> list[int]:
        """Return the positions of the outputs that are gradients: none if no input is one."""
        if op not in self._gradient_positions_by_op:
            return []
        return [i for i, tensor in enumerate(op.outputs) if is_differentiable(tensor)]

    def last_op(self, forward: tf.Operation) -> tf.Operation:
        """Return the last backward operation that reads a gradient; without such an operation the last one.

        Backward operations that read none, such as those that compute shapes, may come later.
        """
        backward_ops = self.backward_ops[forward]
        return next((op for op in reversed(backward_ops) if self.gradient_inputs(op)), backward_ops[-1])

    def incoming_gradients(self, op: tf.Operation) -> list[int]:
        """Return the positions of the inputs that are gradients of the forward operation's outputs.

        Where several operations read an output, its gradient is a sum; the summands are not counted.
        """
        if op.type == "AddN":
            return []
        forward = self._forward_by_op[op]
        producer_by_position = {i: op.inputs[i].op for i in self.gradient_inputs(op)}
        # Other gradients are computed by backward operations of the same forward operation.
        return [
            i
            for i, producer in producer_by_position.items()
            if producer.type == "AddN" or self._forward_by_op.get(producer) is not forward
        ]

    def input_gradients(self, forward: tf.Operation) -> dict[int, Any]:
        """Return the gradients of a forward operation's inputs, by position.

        Gradients and inputs are matched by shape, by the operations that read a gradient, and by the tensors
        that it was computed from: the gradient of a factor is computed from the other factors.
        """
        group = self._group_without_sums(forward)
        computed_gradients = (op.outputs[i] for op in group for i in self.gradient_outputs(op))
        candidates = [tensor for tensor in computed_gradients if self._is_read_outside(tensor, group)]
        inputs = {i: tensor for i, tensor in enumerate(forward.inputs) if is_differentiable(tensor)}
        # TensorFlow has no record of which gradient belongs to which input, so pairs are matched greedily,
        # the best score first; equal scores are in the order of the candidates, and then of the inputs.
        ranking = sorted(
            (-self._match_score(tensor, inputs[i], group), candidate_index, i)
            for (candidate_index, tensor), i in product(enumerate(candidates), inputs)
            if tensor.shape.is_compatible_with(inputs[i].shape)
        )
        gradient_by_position: dict[int, Any] = {}
        matched_candidates: set[int] = set()
        for _, candidate_index, i in ranking:
            if i not in gradient_by_position and candidate_index not in matched_candidates:
                gradient_by_position[i] = candidates[candidate_index]
                matched_candidates.add(candidate_index)
        return gradient_by_position

    def forward_position_read(self, op: tf.Operation, index: int, positions: Sequence[int]) -> int:
        """Return as which input of the forward operation a backward operation reads a tensor.

        index: of the backward operation's input.  positions: the forward operation's inputs that are this
        tensor.  An operation that reads the tensor as often as the forward operation does reads these inputs
        in order; an operation that computes the gradient of one input reads another, as in a product.
        """
        tensor = self._captured_or_self(op.inputs[index])
        read_indices = [
            i
            for i, other_tensor in enumerate(op.inputs)
            if tensor_key(self._captured_or_self(other_tensor)) == tensor_key(tensor)
        ]
        if len(read_indices) >= len(positions):
            return positions[read_indices.index(index)]
        differentiated_positions = self._positions_of_gradients_from(op)
        return next((i for i in positions if i not in differentiated_positions), positions[0])

    def _positions_of_gradients_from(self, op: tf.Operation) -> list[int]:
        """Return the positions of the forward operation's inputs whose gradient depends on an operation."""
        forward = self._forward_by_op[op]
        if forward not in self._ancestors_by_input_of:
            group = self._group_without_sums(forward)
            self._ancestors_by_input_of[forward] = {
                i: self._ancestors(gradient.op, group)
                for i, gradient in self.input_gradients(forward).items()
            }
        return [i for i, ancestors in self._ancestors_by_input_of[forward].items() if op in ancestors]

    @staticmethod
    def _ancestors(op: tf.Operation, group: Sequence[tf.Operation]) -> set[tf.Operation]:
        """Return those operations of a group that an operation depends on, with itself."""
        ancestors: set[tf.Operation] = set()
        pending = [op]
        while pending:
            candidate = pending.pop()
            if candidate in group and candidate not in ancestors:
                ancestors.add(candidate)
                pending += [tensor.op for tensor in candidate.inputs]
        return ancestors

    def _group_without_sums(self, forward: tf.Operation) -> list[tf.Operation]:
        """Return the backward operations of a forward operation, without sums of gradients."""
        return [op for op in self.backward_ops.get(forward, ()) if op.type != "AddN"]

    def _captured_or_self(self, tensor: Any) -> Any:
        """Return the forward graph's tensor that a placeholder stands for, or the tensor itself."""
        captured_tensor = self._body.find_captured(tensor)
        return tensor if captured_tensor is None else captured_tensor

    def _is_read_outside(self, tensor: Any, group: Sequence[tf.Operation]) -> bool:
        """Return True if an operation out of a group reads a gradient, or none in the body does."""
        readers = self._readers_by_gradient.get(tensor_key(tensor), [])
        return not readers or any(reader not in group for reader in readers)

    def _match_score(self, gradient: Any, value: Any, group: Sequence[tf.Operation]) -> int:
        """Score how well a gradient fits the input `value`, by the gradient's readers and by its operands."""
        readers = self._readers_by_gradient.get(tensor_key(gradient), ())
        is_read_by_producer = value.op in [self._forward_by_op.get(reader) for reader in readers]
        # Several gradients of one op are in the order of the inputs, whichever tensors it reads.
        is_only_output = len(self.gradient_outputs(gradient.op)) == 1
        is_of_other_factor = is_only_output and tensor_key(value) not in self._forward_tensors_read(
            gradient.op, group
        )
        # The op that computed an input reads its gradient: that is worth more than any other hint.
        return 4 * is_read_by_producer + is_of_other_factor

    def _forward_tensors_read(self, op: tf.Operation, group: Sequence[tf.Operation]) -> set[Any]:
        """Return the keys of the tensors that a gradient is computed from, within its group."""
        return {
            tensor_key(self._captured_or_self(tensor))
            for ancestor in self._ancestors(op, group)
            for tensor in ancestor.inputs
        }

    def _is_gradient(self, tensor: Any, forward: tf.Operation) -> bool:
        """Return True if an input of a backward operation is a gradient, not a forward value."""
        producer = tensor.op
        if not is_differentiable(tensor):
            return False
        # What a backward operation computes from gradients is a gradient, and nothing else that one computes.
        if producer in self._gradient_positions_by_op:
            return True
        if producer in self._forward_by_op:
            return False
        # A tensor of the forward graph, or of the forward operation.
        if self._body.find_captured(tensor) is not None:
            return False
        if tensor_key(tensor) in map(tensor_key, (*forward.inputs, *forward.outputs)):
            return False
        # In a graph of gradients alone, a gradient comes in through a placeholder, or from any op before.
        if producer.graph is not forward.graph:
            return producer.type in _PLACEHOLDERS or _has_shape_of_output(tensor, forward)
        # A gradient is computed after the forward operation; a value from before it is a forward value.
        is_later = self._position_by_op.get(producer, -1) > self._position_by_op.get(forward, -1)
        return is_later and _has_shape_of_output(tensor, forward)


def tensor_key(tensor: Any) -> tuple[tf.Operation, int]:
    """Return a key of a symbolic tensor: its operation and index."""
    return tensor.op, tensor.value_index


def _receives_gradient(op: tf.Operation) -> bool:
    """Return True for an operation by which `tf.gradients` receives a gradient, as in branches."""
    return op.type == "Identity" and str(op.name).rpartition("/")[2].startswith("grad_ys_")


def _has_shape_of_output(tensor: Any, forward: tf.Operation) -> bool:
    """Return True if a tensor may have the shape of an output, as the gradient of that output has."""
    return any(tensor.shape.is_compatible_with(output.shape) for output in forward.outputs)


def is_differentiable(tensor: Any) -> bool:
    """Return True if a tensor has a dtype that gradients can have."""
    dtype = tensor.dtype.base_dtype
    return bool(dtype.is_floating or dtype.is_complex or dtype == tf.variant)


# The other inputs of BiasAdd and Sub are absent: BiasAddGrad and Neg compute their gradients.
_PASS_THROUGH_INPUTS = {
    "Identity": (0,), "Snapshot": (0,), "EnsureShape": (0,), "BiasAdd": (0,), "Sub": (0,),
    "Add": (0, 1), "AddV2": (0, 1),
}  # fmt: skip
"""By op type, positions of the inputs whose gradient is the output's, unless an operation computes it."""


class PassThroughOps:
    """Redirects readers of gradients that pass through operations, such as an Add, unchanged."""

    def __init__(self, rewriter: BodyRewriter) -> None:
        self._rewriter = rewriter
        self._rewriting = rewriter.rewriting
        self._gradient_edges = rewriter.gradient_edges
        self._passed_ops: set[tf.Operation] = set()

    def positions_passed(self, op: tf.Operation) -> list[int]:
        """Return the positions of the inputs whose gradient is the output's gradient."""
        positions = _PASS_THROUGH_INPUTS.get(op.type, ())
        has_backward_ops = bool(positions) and op in self._gradient_edges.backward_ops
        gradient_by_position = self._gradient_edges.input_gradients(op) if has_backward_ops else {}
        return [i for i in positions if i not in gradient_by_position and is_differentiable(op.inputs[i])]

    def redirect_gradient(
        self, op: tf.Operation, value: Any, gradient: Any, ref: str, unchanged_ref: str
    ) -> None:
        """Make the readers of a forward value's gradient read `ref`, also behind pass-through operations.

        At pass-through operations pullbacks of their routines are inserted on the way.
        op: the backward operation that is being edited.  unchanged_ref: the ref of the unchanged gradient.
        """
        producer = value.op
        if ref != unchanged_ref:
            self._redirect_gradient_readers(producer, gradient, ref)
        positions = self.positions_passed(producer)
        if not positions or producer in self._gradient_edges.backward_ops:
            return  # the producer's last backward operation continues from there
        self._passed_ops.add(producer)
        id_and_facts = self._rewriter.find_forward(producer)
        if id_and_facts is None:
            return
        producer_id, _ = id_and_facts
        refs = self._rewriter.pullbacks.insert_at_pass_through(op, producer_id, gradient, ref, positions)
        for i in positions:
            self.redirect_gradient(op, producer.inputs[i], gradient, refs.get(i, ref), unchanged_ref)

    def _redirect_gradient_readers(self, producer: tf.Operation, gradient: Any, ref: str) -> None:
        """Make backward operations of a value's producer read `ref` instead of the value's gradient.

        For a producer at which the way back ends, also sums and the body's results read `ref`.
        """
        is_end = producer not in self._gradient_edges.backward_ops and not self.positions_passed(producer)
        for reader, i in self._gradient_edges.readers(gradient):
            forward = self._rewriter.forward_ops.get(reader)
            if forward is producer or (is_end and (forward is None or reader.type == "AddN")):
                self._rewriter.refs.redirect(reader, i, ref)
        if is_end:
            self._rewriter.refs.returned[self._rewriter.refs.edge_of(gradient)] = ref

    def report_missed(self, is_backward: bool) -> None:
        """Report routines at pass-through operations whose gradients no backward operation carries.

        is_backward: True if the gradients come from another graph.
        """
        differentiated_ops = self._gradient_edges.backward_ops  # by forward operation
        readers = (consumer for op in differentiated_ops for consumer in _consumers(op))
        for op in dict.fromkeys(readers):
            if op.type not in _PASS_THROUGH_INPUTS or op in self._passed_ops or op in differentiated_ops:
                continue
            # An op behind which nothing is differentiated gets no gradient.
            gets_gradient = is_backward or any(reader in differentiated_ops for reader in _consumers(op))
            if gets_gradient and self._is_in_autodiff(op):
                self._rewriting.report(
                    f"the gradient of the routines at {op.name}",
                    f"{op.type} passes gradients as they are, and has no backward op where it could go",
                )

    def report_guessed(self, ops: Sequence[tf.Operation]) -> None:
        """Report routines at pass-through operations of a body whose gradients are inferred from names."""
        for op in ops:
            is_pass_through = op.type in _PASS_THROUGH_INPUTS and op not in self._rewriter.forward_ops
            if is_pass_through and self._is_in_autodiff(op):
                self._rewriting.report(
                    f"the gradient of the routines at {op.name}",
                    f"{op.type} passes gradients as they are; whose these are only names tell, which may err",
                )

    def _is_in_autodiff(self, op: tf.Operation) -> bool:
        """Return True if routines at an operation take part in autodiff."""
        id_and_facts = self._rewriter.find_forward(op)
        return id_and_facts is not None and id_and_facts[0] in self._rewriting.autodiff_places  # by id


def _consumers(op: tf.Operation) -> Iterator[tf.Operation]:
    """Yield the operations that read an output of an operation."""
    for output in op.outputs:
        yield from output.consumers()
