"""Routines that take part in autodiff: their tapes, and the nodes that pull gradients back through them.

The functions that run use TensorFlow's native tapes: `tf.GradientTape` takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from amanda.backend import Execution
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import imperative_grad
from tensorflow.python.eager import tape as tapes

from ._gradients import is_differentiable, tensor_key
from ._values import dtype_enum

if TYPE_CHECKING:
    from ._body import AutodiffPlace
    from ._rewrite import BodyRewriter

TapedValues = tuple[Sequence[Any], list[Any], Any]
"""Inputs and outputs of routines, and the tape that recorded them; None if each output is an input."""


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
        self._pending_reads = [None] * readers

    def take(self) -> TapedValues:
        """Return the values, for one of the readers; the readers may be on several threads."""
        values = self._values
        assert values is not None
        if self._pending_reads:
            self._pending_reads.pop()
            if not self._pending_reads:
                self._values = None
        return values


def call_on_tape(routines: Callable[[], list[Any]], inputs: Sequence[Any]) -> TapedValues:
    """Call routines while a tape records how the outputs depend on the inputs."""
    # Routines run while recording is stopped for the program's tapes, but this tape has to record. The switch
    # is one for all tapes of a thread.
    stopped = pywrap_tfe.TFE_Py_TapeSetIsStopped()
    if stopped:
        pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
    # Several pullbacks may ask the tape for gradients.
    tape = tapes.push_new_tape(persistent=True)
    try:
        for tensor in inputs:
            tapes.watch(tape, tensor)
        outputs = routines()
    finally:
        tapes.pop_tape(tape)
        if stopped:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()
    # Routines that return their inputs as they are need no tape: each gradient passes unchanged.
    returns_inputs = set(map(id, outputs)) <= set(map(id, inputs))
    return inputs, outputs, None if returns_inputs else tape


def pull_back(
    values: TapedValues, outputs: Sequence[int], inputs: Sequence[int], entering: Sequence[Any]
) -> list[Any]:
    """Return the vector-Jacobian products for the inputs and outputs at these positions."""
    place_inputs, place_outputs, tape = values
    if tape is None:
        return [_gradient_of_alias(place_inputs[i], outputs, place_outputs, entering) for i in inputs]
    # A routine may ignore an input. Its gradient is zeros then, since a node cannot return None.
    sources = [place_inputs[i] for i in inputs]
    # `tf.GradientTape.gradient` calls this function, too, after checks and conversions that are not needed
    # here.
    products = imperative_grad.imperative_grad(
        tape,
        [place_outputs[k] for k in outputs],
        sources,
        list(entering),
        sources,
        tf.UnconnectedGradients.ZERO,
    )
    return [tf.convert_to_tensor(product) for product in products]


def _gradient_of_alias(
    value: Any, outputs: Sequence[int], place_outputs: Sequence[Any], entering: Sequence[Any]
) -> Any:
    """Return the gradient of an input that routines returned: the sum over the outputs that it is."""
    gradients = [gradient for k, gradient in zip(outputs, entering, strict=True) if place_outputs[k] is value]
    if len(gradients) == 1:
        return gradients[0]
    return tf.add_n(gradients) if gradients else tf.zeros_like(value)


class RecalledTensor:
    """Returns a tensor that a node saved in the forward pass.

    place: the key of the saved values.  side: 0 for inputs of the node, 1 for its outputs.
    depth: number of loops around the node.
    """

    def __init__(self, place: Hashable, side: int, index: int, depth: int) -> None:
        self.place = place
        self.side = side
        self.index = index
        self.depth = depth

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Return the tensor, in a list."""
        saved: SavedValues = execution.stored_value((self.place, *rounds[: self.depth]), self)
        tensor: Any = saved.take()[self.side][self.index]
        return [tensor]


class Pullback:
    """Computes gradients of a node's inputs from gradients of its outputs.

    place: the key of the node's saved values.  outputs, inputs: positions among these.
    depth: number of loops around the node.
    """

    def __init__(self, place: Hashable, outputs: Sequence[int], inputs: Sequence[int], depth: int) -> None:
        self.place = place
        self.depth = depth
        self.outputs = tuple(outputs)
        self.inputs = tuple(inputs)

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Return the vector-Jacobian products."""
        saved: SavedValues = execution.stored_value((self.place, *rounds[: self.depth]), self)
        return pull_back(saved.take(), self.outputs, self.inputs, flat)


class Pullbacks:
    """The pullbacks that are inserted into a body.

    `_entered` has, by forward operation and position of an output, the output's gradient and its ref.
    """

    def __init__(self, rewriter: BodyRewriter) -> None:
        self._rewriter = rewriter
        self._rewriting = rewriter.rewriting
        self._insertions = rewriter.insertions
        self._edges = rewriter.gradients
        self._entered: dict[tf.Operation, dict[int, tuple[Any, str]]] = {}
        self._entered_by_id: dict[int, dict[int, tuple[Any, str]]] = {}
        self._pulled: dict[Any, str] = {}

    def insert_at_outputs(self, op: tf.Operation, forward: tf.Operation, forward_id: int) -> None:
        """Make a backward operation read gradients of outputs behind pullbacks of routines after its op."""
        places, read = self._rewriting.autodiff_places.get(forward_id), self._rewriter.read_at
        self._entered_by_id[forward_id] = self._entered.setdefault(forward, {})
        for i in self._edges.incoming(op) if self._rewriting.autodiff_places else ():
            tensor = op.inputs[i]
            position = self._output_of(forward, tensor)
            if position is None:
                continue
            ref = self._pulled.get((forward, tensor_key(tensor)))
            if ref is None:
                ref = read(op, i)
                # Gradients pass the routines in reverse order.
                for place in reversed([place for place in places or () if place.side == "after"]):
                    pulled = self._insert_pullback(op, place, {position: (tensor, ref)}, {position: tensor})
                    ref = pulled.get(position, ref)
                self._pulled[forward, tensor_key(tensor)] = ref
            self._entered.setdefault(forward, {})[position] = (tensor, ref)
            if ref != read(op, i):
                self._rewriter.redirect(op, i, ref)

    def insert_at_inputs(
        self, op: tf.Operation, forward: tf.Operation, forward_id: int, pass_through: Sequence[int] = ()
    ) -> dict[int, tuple[Any, str]]:
        """Return the gradients of a forward operation's inputs behind all pullbacks, each with its ref.

        op: the last backward operation.
        pass_through: positions of the inputs whose gradient is the output's gradient.
        """
        places = self._rewriting.autodiff_places.get(forward_id, [])
        before = [place for place in places if place.side == "before"]
        instead = [place for place in places if place.side == "instead"]
        gradients = self._edges.input_gradients(forward) if self._rewriting.autodiff_places else {}
        refs = {i: (tensor, self._rewriter.read_tensor(tensor)) for i, tensor in gradients.items()}
        entered = self._entered.get(forward, {})
        # No operation computes the gradient of such an input: the gradient of the output is it.
        if pass_through and 0 in entered:
            refs |= dict.fromkeys(pass_through, entered[0])
            gradients = {i: tensor for i, (tensor, _) in refs.items()}
        for place in instead:
            pulled = self._insert_pullback(op, place, self._entered.get(forward, {}), gradients)
            refs = {i: (gradients[i], ref) for i, ref in pulled.items()}
        for place in (place for place in places if place.side == "past"):
            pulled = self._insert_pullback(
                op, place, self._entered_by_id.get(place.replacement_id or 0, {}), gradients
            )
            refs |= {i: (gradients[i], ref) for i, ref in pulled.items()}
        for place in reversed(before):
            pulled = self._insert_pullback(op, place, refs, gradients)
            refs |= {i: (gradients[i], ref) for i, ref in pulled.items()}
        return refs

    def insert_past(
        self, op: tf.Operation, forward_id: int, gradient: Any, ref: str, positions: Sequence[int]
    ) -> dict[int, str]:
        """Return refs of the gradients of inputs, behind all pullbacks of a pass-through operation."""
        places = self._rewriting.autodiff_places.get(forward_id, [])
        for place in reversed([place for place in places if place.side == "after"]):
            ref = self._insert_pullback(op, place, {0: (gradient, ref)}, {0: gradient}).get(0, ref)
        gradients = dict.fromkeys(positions, gradient)
        refs = dict.fromkeys(positions, ref)
        for place in reversed([place for place in places if place.side in ("before", "instead", "past")]):
            incoming = {i: (gradient, ref) for i, ref in refs.items()}
            if place.side != "before":
                incoming = (
                    {0: (gradient, ref)}
                    if place.replacement_id is None
                    else self._entered_by_id.get(place.replacement_id, {})
                )
            refs |= self._insert_pullback(op, place, incoming, gradients)
        return refs

    def _insert_pullback(
        self,
        op: tf.Operation,
        place: AutodiffPlace,
        entering: dict[int, tuple[Any, str]],
        input_gradients: dict[int, Any],
    ) -> dict[int, str]:
        """Insert a pullback for a node with routines; return refs of the gradients of its inputs.

        entering: gradients of the node's outputs, by position, each with its ref.
        input_gradients: tensors with the dtype of the gradients of its inputs, by position.
        """
        outputs = [(k, *entering[i]) for k, i in enumerate(place.output_positions) if i in entering]
        inputs = [(k, i) for k, i in enumerate(place.input_positions) if i in input_gradients]
        if not outputs or not inputs:
            return {}
        depth = self._rewriting.depths.get(place.values_key[0], 0)
        pullback = Pullback(place.values_key, [k for k, *_ in outputs], [k for k, _ in inputs], depth)
        identity, node_name = place.node
        is_in_body = identity == self._insertions.body.identity
        dependencies = self._insertions.dependencies
        control_inputs = (
            dependencies.control_inputs_after([node_name], self._rewriter.body.number_at(op, True))
            if is_in_body
            else []
        )
        readers = self._rewriting.readers[place.values_key]
        readers.count += 1
        # A pullback in another body, in a loop or behind a branch may run several times, or never.
        if not is_in_body or depth or self._insertions.body.node_name(op) in dependencies.in_flow:
            readers.read_once = False
        name = self._insertions.add(
            op, pullback, [ref for *_, ref in outputs], [dtype_enum(tensor) for _, tensor, _ in outputs],
            [dtype_enum(input_gradients[i]) for _, i in inputs], ahead=True, instead=True,
            control_inputs=control_inputs,
        )  # fmt: skip
        return {i: self._insertions.output_of(name, k) for k, (_, i) in enumerate(inputs)}

    def _output_of(self, forward: tf.Operation, gradient: Any) -> int | None:
        """Return the position of the output that a gradient belongs to: the first that fits, or None."""
        entered = self._entered.get(forward, {})
        outputs: Sequence[Any] = forward.outputs
        for i, output in enumerate(outputs):
            # TensorFlow does not record of which output a gradient is, so shapes decide; the first free
            # output wins.
            entered_gradient = entered.get(i)
            if entered_gradient is not None and tensor_key(entered_gradient[0]) == tensor_key(gradient):
                return i
            if (
                entered_gradient is None
                and is_differentiable(output)
                and (len(outputs) == 1 or gradient.shape.is_compatible_with(output.shape))
            ):
                return i
        return None
