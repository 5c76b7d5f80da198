"""Routines that take part in autodiff: their tapes, and the nodes that pull gradients back through them.

The functions that run use TensorFlow's native tapes: `tf.GradientTape` takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf
from amanda.backend import Execution
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import imperative_grad
from tensorflow.python.eager import tape as tapes

from ._gradients import is_differentiable, tensor_key
from ._sides import dtype_enum

if TYPE_CHECKING:
    from ._body import AutodiffPlace
    from ._rewrite import BodyRewriter


class TapedValues(NamedTuple):
    """Inputs and outputs of routines, and the tape that recorded them; None if each output is an input."""

    inputs: Sequence[Any]
    outputs: list[Any]
    tape: Any


class SavedKey(NamedTuple):
    """The key under which a node with routines saves values; number: among the nodes of the op."""

    op_id: int
    side: str
    number: int


@dataclass
class Readers:
    """The number of nodes that read the saved values of a place.

    read_once: True if each of them runs exactly once in an execution.
    """

    count: int = 0
    read_once: bool = True


class SavedValues:
    """Saved values, which are released when as many readers as expected have read them.

    readers: the expected number; 0 if unknown, then the values live as long as the execution.
    """

    # A variable whose value nothing else holds is updated in place, which saves a copy of its memory.

    def __init__(self, values: TapedValues, readers: int) -> None:
        self._values: TapedValues | None = values
        # `list.pop` is atomic, so that no lock is needed.
        self._tokens_of_pending_reads = [None] * readers

    def take(self) -> TapedValues:
        """Return the values to one of the readers, and release them with the last.

        The readers may be on several threads.
        """
        values = self._values
        assert values is not None
        # Without tokens from the beginning, the number of readers is unknown.
        if self._tokens_of_pending_reads:
            self._tokens_of_pending_reads.pop()
            if not self._tokens_of_pending_reads:
                self._values = None
        return values


def call_on_tape(call_routines: Callable[[], list[Any]], inputs: Sequence[Any]) -> TapedValues:
    """Call routines while a new tape, returned with the values, records how outputs depend on inputs.

    The tape is None for routines that return their inputs as they are.
    """
    # Routines run while recording is stopped for the program's tapes, but this tape has to record. The switch
    # is one for all tapes of a thread.
    was_stopped = pywrap_tfe.TFE_Py_TapeSetIsStopped()
    if was_stopped:
        pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
    # Several pullbacks may ask the tape for gradients.
    tape = tapes.push_new_tape(persistent=True)
    try:
        for tensor in inputs:
            tapes.watch(tape, tensor)
        outputs = call_routines()
    finally:
        tapes.pop_tape(tape)
        if was_stopped:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()
    # Routines that return their inputs as they are need no tape: each gradient passes unchanged.
    are_outputs_inputs = set(map(id, outputs)) <= set(map(id, inputs))
    return TapedValues(inputs, outputs, None if are_outputs_inputs else tape)


def pull_back(
    values: TapedValues,
    output_positions: Sequence[int],
    input_positions: Sequence[int],
    output_gradients: Sequence[Any],
) -> list[Any]:
    """Return the gradients of some inputs from those of some outputs: vector-Jacobian products.

    Positions are those among the values.  The gradient of an input that no output depends on is zeros.
    """
    inputs = [values.inputs[i] for i in input_positions]
    outputs = [values.outputs[k] for k in output_positions]
    if values.tape is None:
        return [_gradient_of_unchanged(tensor, outputs, output_gradients) for tensor in inputs]
    # A routine may ignore an input. Its gradient is zeros then, since a node cannot return None.
    # `tf.GradientTape.gradient` calls this function, too, after checks and conversions that are not needed
    # here.
    products = imperative_grad.imperative_grad(
        values.tape, outputs, inputs, list(output_gradients), sources_raw=inputs,
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )  # fmt: skip
    return [tf.convert_to_tensor(product) for product in products]


def _gradient_of_unchanged(value: Any, outputs: Sequence[Any], output_gradients: Sequence[Any]) -> Any:
    """Return the gradient of an input that routines return as it is: the sum over outputs that are the input.

    Zeros if no output is.
    """
    gradients = [
        gradient for output, gradient in zip(outputs, output_gradients, strict=True) if output is value
    ]
    if len(gradients) == 1:
        return gradients[0]
    return tf.add_n(gradients) if gradients else tf.zeros_like(value)


class SavedTensor(NamedTuple):
    """The place of a tensor among saved values.

    key: the key of the saved values; None for a value that is not saved.
    is_output: True for an output of the routines, False for an input.  position: among these.
    """

    key: SavedKey | None
    is_output: bool
    position: int


class RecalledTensor:
    """Returns a tensor that a node saved in the forward pass.

    loop_depth: number of loops around the node.
    """

    def __init__(self, tensor: SavedTensor, loop_depth: int) -> None:
        self._tensor = tensor
        self._loop_depth = loop_depth

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Return the tensor, in a list; the last reader releases the saved values."""
        key, is_output, position = self._tensor
        saved_values: SavedValues = execution.stored_value((key, *rounds[: self._loop_depth]), self)
        values = saved_values.take()
        return [(values.outputs if is_output else values.inputs)[position]]


class Pullback:
    """Computes gradients of a node's inputs from gradients of its outputs.

    key: the key of the node's saved values.  output_positions, input_positions: positions among these.
    loop_depth: number of loops around the node.
    """

    def __init__(
        self, key: SavedKey, output_positions: Sequence[int], input_positions: Sequence[int], loop_depth: int
    ) -> None:
        self.key = key
        self.loop_depth = loop_depth
        self.output_positions = tuple(output_positions)
        self.input_positions = tuple(input_positions)

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Return the gradients of the inputs; the tensors are the gradients of the outputs.

        The last reader releases the saved values.
        """
        saved_values: SavedValues = execution.stored_value((self.key, *rounds[: self.loop_depth]), self)
        return pull_back(
            saved_values.take(), self.output_positions, self.input_positions, output_gradients=flat
        )


class Gradient(NamedTuple):
    """A gradient in a body: its symbol, and the ref of its value behind pullbacks."""

    tensor: Any
    ref: str


class Pullbacks:
    """Inserts into a body the nodes that pull gradients back through the routines at forward operations.

    `_output_gradients` has the gradients of the outputs of a forward operation, by position;
    `_output_gradients_by_id` the same by op id.  `_refs_behind_pullbacks` has, by forward operation and
    gradient, the ref that all backward operations of that forward operation read.
    """

    def __init__(self, rewriter: BodyRewriter) -> None:
        self._rewriter = rewriter
        self._rewriting = rewriter.rewriting
        self._insertions = rewriter.insertions
        self._gradient_edges = rewriter.gradient_edges
        self._output_gradients: dict[tf.Operation, dict[int, Gradient]] = {}
        self._output_gradients_by_id: dict[int, dict[int, Gradient]] = {}
        self._refs_behind_pullbacks: dict[Any, str] = {}

    def insert_at_outputs(self, op: tf.Operation, forward: tf.Operation, forward_id: int) -> None:
        """Make a backward operation read gradients of outputs, which it records, behind their pullbacks."""
        output_gradients = self._output_gradients.setdefault(forward, {})
        self._output_gradients_by_id[forward_id] = output_gradients
        if not self._rewriting.autodiff_places:
            return
        for i in self._gradient_edges.incoming_gradients(op):
            tensor = op.inputs[i]
            output_position = self._output_of_gradient(forward, tensor)
            if output_position is None:
                continue
            gradient_key = forward, tensor_key(tensor)
            # Several backward operations may read the gradient: the pullbacks are inserted at the first.
            if gradient_key not in self._refs_behind_pullbacks:
                gradient = Gradient(tensor, self._rewriter.refs.of_input(op, i))
                ref = self._insert_after(op, forward_id, gradient, output_position)
                self._refs_behind_pullbacks[gradient_key] = ref
            ref = self._refs_behind_pullbacks[gradient_key]
            output_gradients[output_position] = Gradient(tensor, ref)
            if ref != self._rewriter.refs.of_input(op, i):
                self._rewriter.refs.redirect(op, i, ref)

    def _insert_after(self, op: tf.Operation, forward_id: int, gradient: Gradient, position: int) -> str:
        """Insert pullbacks of the routines after a forward operation; return the ref of the gradient."""
        places = self._rewriting.autodiff_places.get(forward_id, [])
        # Gradients pass the routines in reverse order.
        for place in reversed([place for place in places if place.side == "after"]):
            ref_by_position = self._insert_pullback(
                op, place, {position: gradient}, {position: gradient.tensor}
            )
            # A pullback that was not inserted leaves the gradient.
            gradient = gradient._replace(ref=ref_by_position.get(position, gradient.ref))
        return gradient.ref

    def insert_at_inputs(
        self, op: tf.Operation, forward: tf.Operation, forward_id: int, pass_through: Sequence[int] = ()
    ) -> dict[int, Gradient]:
        """Insert the pullbacks of routines before or instead of a forward operation.

        Also those of a replacement of another operation that reads inputs of this one.
        Returns the gradients of the forward operation's inputs behind the pullbacks, by position.
        op: the last backward operation.
        pass_through: positions of the inputs whose gradient is the output's gradient.
        """
        places = self._rewriting.autodiff_places.get(forward_id, [])
        symbols = self._gradient_edges.input_gradients(forward) if self._rewriting.autodiff_places else {}
        input_gradients = {
            i: Gradient(symbol, self._rewriter.refs.of_tensor(symbol)) for i, symbol in symbols.items()
        }
        output_gradients = self._output_gradients.get(forward, {})
        # No operation computes the gradient of such an input: the gradient of the output is it.
        if pass_through and 0 in output_gradients:
            input_gradients |= dict.fromkeys(pass_through, output_gradients[0])
            symbols = {i: gradient.tensor for i, gradient in input_gradients.items()}

        def insert(place: AutodiffPlace, incoming_gradients: dict[int, Gradient]) -> dict[int, Gradient]:
            ref_by_position = self._insert_pullback(op, place, incoming_gradients, symbols)
            return {i: Gradient(symbols[i], ref) for i, ref in ref_by_position.items()}

        # The replacement computes the gradients of its inputs instead of the operation's own gradients.
        for place in places:
            if place.side == "instead":
                input_gradients = insert(place, output_gradients)
        # A replacement of another operation that reads inputs of this one gives their gradients, too.
        for place in places:
            if place.side == "reader":
                replaced_gradients = self._output_gradients_by_id.get(place.replacement_id or 0, {})
                input_gradients |= insert(place, replaced_gradients)
        # Gradients pass the routines in reverse order.
        for place in reversed([place for place in places if place.side == "before"]):
            input_gradients |= insert(place, input_gradients)
        return input_gradients

    def insert_at_pass_through(
        self, op: tf.Operation, forward_id: int, gradient: Any, ref: str, positions: Sequence[int]
    ) -> dict[int, str]:
        """Insert all pullbacks of a pass-through operation; return refs of the gradients of its inputs.

        gradient: of the output, and of the inputs at these positions.  ref: its ref.
        """
        ref = self._insert_after(op, forward_id, Gradient(gradient, ref), position=0)
        input_gradients = dict.fromkeys(positions, gradient)
        ref_by_position = dict.fromkeys(positions, ref)
        for place in reversed(self._rewriting.autodiff_places.get(forward_id, [])):
            if place.side == "after":
                continue
            if place.side == "before":
                incoming_gradients = {
                    i: Gradient(gradient, input_ref) for i, input_ref in ref_by_position.items()
                }
            elif place.replacement_id is None:  # instead of this operation
                incoming_gradients = {0: Gradient(gradient, ref)}
            else:  # instead of another operation, which reads inputs of this one
                incoming_gradients = self._output_gradients_by_id.get(place.replacement_id, {})
            ref_by_position |= self._insert_pullback(op, place, incoming_gradients, input_gradients)
        return ref_by_position

    def _insert_pullback(
        self, op: tf.Operation, place: AutodiffPlace, output_gradients: dict[int, Gradient],
        input_gradients: dict[int, Any],
    ) -> dict[int, str]:  # fmt: skip
        """Insert a pullback for a node with routines; return refs of the gradients of its inputs.

        The pullback counts as a reader of the node's saved values.  None is inserted, and {} returned, if no
        gradient enters, or none is asked for.
        op: the backward operation ahead of which the pullback runs.
        output_gradients: gradients of the node's outputs, by position in the forward operation.
        input_gradients: symbols with the dtypes of the gradients of its inputs, likewise.
        """
        # The pullback counts positions among the node's saved values, which are the keys here.
        incoming_by_saved = {
            saved_position: output_gradients[position]
            for saved_position, position in enumerate(place.output_positions)
            if position in output_gradients
        }
        position_by_saved = {
            saved_position: position
            for saved_position, position in enumerate(place.input_positions)
            if position in input_gradients
        }
        if not incoming_by_saved or not position_by_saved:
            return {}
        incoming_gradients = list(incoming_by_saved.values())
        result_positions = list(position_by_saved.values())
        loop_depth = self._rewriting.loop_depth_by_op_id.get(place.saved_key.op_id, 0)
        pullback = Pullback(place.saved_key, list(incoming_by_saved), list(position_by_saved), loop_depth)
        is_in_body = place.body_identity == self._insertions.body.identity
        control_inputs: list[str] = []
        if is_in_body:  # the pullback waits for the node, which saves the values
            number_ref = self._insertions.body.number_ref_at(op, ahead=True)
            control_inputs = self._insertions.dependencies.control_inputs_after([place.node_name], number_ref)
        self._count_reader(op, place, runs_once=is_in_body and not loop_depth)
        name = self._insertions.add_slot_call(
            op, pullback, [gradient.ref for gradient in incoming_gradients],
            [dtype_enum(gradient.tensor) for gradient in incoming_gradients],
            [dtype_enum(input_gradients[i]) for i in result_positions], ahead=True, is_unawaited=True,
            control_inputs=control_inputs,
        )  # fmt: skip
        return {position: self._insertions.output_of(name, i) for i, position in enumerate(result_positions)}

    def _count_reader(self, op: tf.Operation, place: AutodiffPlace, runs_once: bool) -> None:
        """Count a pullback ahead of an operation among the readers of a place's saved values.

        runs_once: False for a pullback in another body or in a loop, which may run several times, or never.
        """
        readers = self._rewriting.readers_by_saved_key[place.saved_key]
        readers.count += 1
        is_conditional = (
            self._insertions.body.node_name(op) in self._insertions.dependencies.conditional_names
        )
        if not runs_once or is_conditional:
            readers.read_once = False

    def _output_of_gradient(self, forward: tf.Operation, gradient: Any) -> int | None:
        """Return the position of the output that a gradient belongs to: the first that fits, or None.

        An output fits whose recorded gradient it is, or that has none yet and a compatible shape.
        """
        output_gradients = self._output_gradients.get(forward, {})
        outputs: Sequence[Any] = forward.outputs
        for i, output in enumerate(outputs):
            # TensorFlow does not record of which output a gradient is.
            if i in output_gradients:
                if tensor_key(output_gradients[i].tensor) == tensor_key(gradient):
                    return i
            elif is_differentiable(output) and (
                len(outputs) == 1 or gradient.shape.is_compatible_with(output.shape)
            ):
                return i
        return None
