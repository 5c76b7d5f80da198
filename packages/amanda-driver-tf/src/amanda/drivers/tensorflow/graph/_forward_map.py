"""The forward operation of each gradient operation, recorded at its creation or inferred from names."""

from __future__ import annotations

import functools
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from amanda.backend import Patches
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop, execute
from tensorflow.python.eager import record as tape_record
from tensorflow.python.eager.polymorphic_function import concrete_function
from tensorflow.python.framework import ops

_GRADIENT_SCOPE = re.compile(r"(?:^|/)gradients(?:_\d+)?/")
_GRAD_SUFFIX = re.compile(r"_grad(?:_\d+)?(?:/|$)")
_TAPE_SCOPE = re.compile(r"(?:^|.*?/)gradient_tape/(?:(.*)/)?[^/]*$")

_MAX_ORDER = 17
"""Length at which a chain of forward operations is cut: a wrong guess from names may make a cycle."""
_WITHOUT_GRADIENT_OPS = frozenset({"Identity", "Snapshot", "EnsureShape"})
"""Ops that have no gradient operations."""
_WITHOUT_PRODUCTS = frozenset(
    {"Add", "AddN", "AddV2", "BiasAdd", "ExpandDims", "Reshape", "Squeeze", "Sub", "Transpose"}
)
"""Ops whose gradient contains no product."""


class _Records:
    """Forward operations of gradient operations, recorded when TensorFlow creates the latter."""

    def __init__(self) -> None:
        # Weak both ways: the records must not keep the user's graphs alive.
        self._forward_by_op: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()

    def record(self, op: tf.Operation, forward: tf.Operation) -> None:
        """Record that `op` computes a gradient of `forward`, unless another record of `op` exists."""
        if op is not forward and op not in self._forward_by_op:
            self._forward_by_op[op] = weakref.ref(forward)

    def get(self, op: tf.Operation) -> tf.Operation | None:
        """Return the forward operation, from TensorFlow's record if there is none here; None without both."""
        reference = self._forward_by_op.get(op)
        # TensorFlow itself records the forward op of `tf.gradients`, not of tapes.
        return op._original_op if reference is None else reference()


records = _Records()


class ForwardMap:
    """The forward operation of each gradient operation of a graph.

    ops: the graph's operations, in order.
    forward_ops: the operations of the differentiated graph by name; by default those of this graph.
    find_captured: returns the forward graph's tensor that a placeholder stands for; None for other tensors.
    default: the forward operation of operations without any hint: the call of a graph of gradients.
    forward_is_elsewhere: True if the forward operations are in another graph.
    guessed: operations whose forward operation was inferred from names.
    """

    def __init__(
        self,
        ops: Sequence[tf.Operation],
        forward_ops: Mapping[str, tf.Operation] | None = None,
        find_captured: Callable[[Any], Any] = lambda tensor: None,
        default: tf.Operation | None = None,
        forward_is_elsewhere: bool = False,
    ) -> None:
        self._forward_op_by_name = {op.name: op for op in ops} if forward_ops is None else forward_ops
        self._find_captured = find_captured
        self.guessed: list[tf.Operation] = []
        self._forward_by_op: dict[tf.Operation, tf.Operation] = {}
        self._position_by_op = {op: i for i, op in enumerate(ops)}
        self._consumers_by_op: dict[tf.Operation, list[tf.Operation]] = {}  # filled by `_map_sums`
        self._ops_by_scope: dict[str, list[tf.Operation]] | None = None  # filled by `_ops_in_scope`
        ops_by_name = {} if forward_is_elsewhere or default is not None else {op.name: op for op in ops}
        for op in ops:
            forward = (
                self._recorded_forward(op, ops_by_name)
                or self._called_forward(op)
                or self._forward_by_names(op)
                or default
            )
            if forward is not None and forward is not op:
                self._forward_by_op[op] = forward
        self._map_sums(ops)

    def __call__(self, op: tf.Operation) -> tf.Operation | None:
        """Return the forward operation; for gradients of gradients, the first one."""
        return next(reversed(self._forward_chain(op)), None)

    def order(self, op: tf.Operation) -> int:
        """Return 1 for a gradient operation, 2 for one of second gradients, and so on; 0 for others."""
        return len(self._forward_chain(op))

    def _forward_chain(self, op: tf.Operation) -> list[tf.Operation]:
        """Return an operation's forward operation, then the forward operation of that, and so on."""
        chain: list[tf.Operation] = []
        forward = self._forward_by_op.get(op)
        while forward is not None and len(chain) < _MAX_ORDER:
            chain.append(forward)
            # The operations of another graph are in the records alone.
            forward = self._forward_by_op.get(forward) or records.get(forward)
        return chain

    @staticmethod
    def _recorded_forward(op: tf.Operation, ops_by_name: Mapping[str, tf.Operation]) -> tf.Operation | None:
        """Return the recorded forward operation, else None.

        In TensorFlow's copy of a graph, records are of the original's operations; then the copy's operation
        of that name and type is returned.  ops_by_name: the operations of the copy.
        """
        forward = records.get(op)
        if forward is None or forward.graph is op.graph:
            return forward
        copied_forward = ops_by_name.get(forward.name)
        is_copy = copied_forward is not None and copied_forward.type == forward.type
        return copied_forward if is_copy else forward

    def _called_forward(self, op: tf.Operation) -> tf.Operation | None:
        """Return the call of a forward function for a call of its backward function, else None.

        The backward function reads results of the forward function.
        """
        if not _calls_function(op, "__backward_"):
            return None
        for tensor in reversed(op.inputs):
            captured_tensor = self._find_captured(tensor)
            source = tensor.op if captured_tensor is None else captured_tensor.op
            if _calls_function(source, "__forward_"):
                return source
        return None

    def _forward_by_names(self, op: tf.Operation) -> tf.Operation | None:
        """Infer the forward operation of an operation from names and tensors; None if that fails.

        An operation with a forward operation is added to `guessed`.
        """
        # `tf.gradients` names the forward op; a tape names only the scope of that op.
        forward = self._forward_by_gradient_scope(op)
        tape_match = _TAPE_SCOPE.match(op.name)
        if forward is None and tape_match is not None:
            forward_scope = tape_match.group(1) or ""
            forward = self._forward_of_factor(op) or self._forward_by_shared_tensors(op, forward_scope)
        if forward is not None:
            self.guessed.append(op)
        return forward

    def _forward_by_gradient_scope(self, op: tf.Operation) -> tf.Operation | None:
        """Return the operation "x" for a name scope "gradients/x_grad"; such scopes may be nested."""
        # Innermost first: the gradient of a gradient belongs to the latter.
        for scope in reversed(list(_GRADIENT_SCOPE.finditer(op.name))):
            # The name of a forward operation may contain "_grad", too, so the longest name is tried first.
            for suffix in reversed(list(_GRAD_SUFFIX.finditer(op.name, scope.end()))):
                forward = self._forward_op_by_name.get(op.name[scope.end() : suffix.start()])
                if forward is not None:
                    return forward
        return None

    def _forward_of_factor(self, op: tf.Operation) -> tf.Operation | None:
        """Return the forward operation of an input that is computed from that operation's tensors, or None.

        Such an input is a factor of the gradient, as the cosine is for a sine.
        """
        for tensor in op.inputs:
            forward = self._forward_by_op.get(tensor.op)
            if forward is not None and len(tensor.op.inputs) > 0:
                forward_tensors = {_tensor_key(value) for value in (*forward.inputs, *forward.outputs)}
                if all(self._captured_key(operand) in forward_tensors for operand in tensor.op.inputs):
                    return forward
        return None

    def _captured_key(self, tensor: Any) -> tuple[Any, int]:
        """Return the key of the forward graph's tensor that a placeholder stands for, or of the tensor."""
        captured_tensor = self._find_captured(tensor)
        return _tensor_key(tensor if captured_tensor is None else captured_tensor)

    def _forward_by_shared_tensors(self, op: tf.Operation, scope: str) -> tf.Operation | None:
        """Return the operation of a name scope that shares most tensors with a gradient operation, if any.

        A type with which the gradient operation's begins counts for more than a tensor.
        """
        keys_read = {self._captured_key(tensor) for tensor in op.inputs}
        best_score, best_candidate = 1, None
        position = self._position_by_op[op]
        for candidate in self._ops_in_scope(scope):
            if self._position_by_op.get(candidate, -1) > position:
                continue  # a gradient comes after its forward operation
            if candidate.type in _WITHOUT_GRADIENT_OPS or (
                op.type == "Mul" and candidate.type in _WITHOUT_PRODUCTS
            ):
                continue
            share_count = sum(
                _tensor_key(tensor) in keys_read for tensor in (*candidate.inputs, *candidate.outputs)
            )
            # "Conv2DBackpropInput" begins with the type of its forward op, which says more than a shared
            # tensor.
            score = 2 * share_count + 3 * op.type.startswith(candidate.type)
            if score >= best_score:  # of equal scores, the last operation wins
                best_score, best_candidate = score, candidate
        return best_candidate

    def _ops_in_scope(self, scope: str) -> list[tf.Operation]:
        """Return the forward operations in a name scope, or of that name."""
        if self._ops_by_scope is None:
            self._ops_by_scope = {}
            for name, op in self._forward_op_by_name.items():
                if "gradient_tape/" not in name:
                    self._ops_by_scope.setdefault(name.rpartition("/")[0], []).append(op)
                    self._ops_by_scope.setdefault(name, []).append(op)
        return self._ops_by_scope.get(scope, [])

    def _map_sums(self, ops: Iterable[tf.Operation]) -> None:
        """Map sums of mapped gradients to the operation of whose output they are the gradient."""
        sums = [op for op in ops if op.type == "AddN" and op not in self._forward_by_op]
        if not sums:
            return
        for op in self._position_by_op:
            for tensor in op.inputs:
                self._consumers_by_op.setdefault(tensor.op, []).append(op)
        for op in sums:
            summand_forwards = [
                self._forward_by_op[tensor.op] for tensor in op.inputs if tensor.op in self._forward_by_op
            ]
            if len(summand_forwards) < len(op.inputs):
                continue
            reader_forwards = [
                self._forward_by_op[reader]
                for reader in self._consumers_by_op.get(op, ())
                if reader in self._forward_by_op
            ]
            # The gradient ops of the output's producer read the sum, and the producer ran before it.
            producers = [
                forward
                for forward in reader_forwards
                if self._position_by_op.get(forward, -1) < self._position_by_op[op]
            ]
            self._forward_by_op[op] = producers[0] if producers else summand_forwards[0]


def _calls_function(op: tf.Operation, name_part: str) -> bool:
    """Return True if an operation calls a function with this text in its name."""
    if op.type not in ("PartitionedCall", "StatefulPartitionedCall"):
        return False
    name: str = op.get_attr("f").name
    return name_part in name


def _tensor_key(tensor: Any) -> tuple[Any, int]:
    return (tensor.op, tensor.value_index)


_MARK = "_amanda_forward"


class _DifferentiatedOps(threading.local):
    """The forward operations whose gradients this thread is creating, the innermost last."""

    def __init__(self) -> None:
        self.ops: list[Any] = []


_differentiated = _DifferentiatedOps()


@contextmanager
def _record_gradient_ops_of(op: Any) -> Iterator[None]:
    """Return a context in which created operations are recorded as gradients of `op`, if not None."""
    _differentiated.ops.append(op)
    try:
        yield
    finally:
        _differentiated.ops.pop()


def record_gradients(patches: Patches) -> None:
    """Patch the functions that create gradients, until `patches` are restored.

    Call `forget_gradient_function` then.
    """
    _patch_symbolic_gradients(patches)
    _patch_tapes(patches)
    _patch_backward_functions(patches)
    _patch_function_gradients(patches)


def forget_gradient_function() -> None:
    """Make tapes call the present `_gradient_function`, unless the program has deleted it."""
    if hasattr(backprop, "_gradient_function"):
        # Native code calls the function that was registered last, whatever the module's attribute is.
        pywrap_tfe.TFE_Py_RegisterGradientFunction(backprop._gradient_function)


def _patch_symbolic_gradients(patches: Patches) -> None:
    """Patch `Graph._original_op`, within which `tf.gradients` creates ops, and the creation of ops."""
    enter = ops.Graph._original_op
    create = ops.Graph._create_op_internal

    @functools.wraps(enter)
    @contextmanager
    def original_op(self: Any, op: Any) -> Iterator[None]:
        with _record_gradient_ops_of(op), enter(self, op):
            yield

    @functools.wraps(create)
    def create_op_internal(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Create an op; record it as a gradient of the op that the thread is differentiating, if any."""
        created_op = create(self, *args, **kwargs)
        forward = _differentiated.ops[-1] if _differentiated.ops else None
        if forward is not None:  # None also for an op whose graph is gone
            records.record(created_op, forward)
        return created_op

    patches.set(ops.Graph, "_original_op", original_op)
    patches.set(ops.Graph, "_create_op_internal", create_op_internal)


def _patch_tapes(patches: Patches) -> None:
    """Patch the recording of graph ops on tapes, and the gradient function that tapes call for them."""
    record = execute.record_gradient
    compute = backprop._gradient_function

    @functools.wraps(record)
    def record_gradient(op_name: str, inputs: Any, attrs: Any, outputs: Any) -> Any:
        """Stand-in for `record_gradient`: marks the record of a graph op with a reference to the op."""
        first_output: Any = outputs[0] if isinstance(outputs, (list, tuple)) and outputs else None
        if _is_of_graph_op(first_output):
            # A tape passes attributes to the gradient function unread; the stand-in below takes the mark out
            # again.
            attrs = (*(attrs or ()), _MARK, weakref.ref(first_output.op))
        return record(op_name, inputs, attrs, outputs)

    @functools.wraps(compute)
    def gradient_function(op_name: str, attr_tuple: Any, *positional: Any) -> Any:
        """Stand-in for `_gradient_function`: its ops are gradient ops of the op in the mark, if any."""
        if not attr_tuple or _MARK not in attr_tuple[-2:]:
            return compute(op_name, attr_tuple, *positional)
        *plain_attrs, _, op_reference = attr_tuple
        with _record_gradient_ops_of(op_reference()):
            return compute(op_name, tuple(plain_attrs), *positional)

    patches.set(execute, "record_gradient", record_gradient)
    patches.set(backprop, "_gradient_function", gradient_function)
    forget_gradient_function()


def _patch_backward_functions(patches: Patches) -> None:
    """Patch the functions that record a backward function on tapes.

    Custom gradients (an IdentityN) and functions under a forward accumulator are recorded so. The ops of the
    backward function belong to the operation that computed the outputs.
    """
    for name in ("record_operation", "record_operation_backprop_only", "record_operation_forwardprop_only"):
        patches.set(tape_record, name, _stand_in_for_record_operation(getattr(tape_record, name)))


def _is_of_graph_op(output: Any) -> bool:
    """Return True for a symbolic tensor. Eager outputs have no op; an eager driver records theirs."""
    return output is not None and not isinstance(output, ops.EagerTensor) and hasattr(output, "op")


def _stand_in_for_record_operation(original: Any) -> Any:
    """Stand-in for `record_operation` and its variants: records which op the backward function is of."""

    @functools.wraps(original)
    def record_operation(
        op_type: Any, output_tensors: Any, input_tensors: Any, backward_function: Any, *positional: Any,
        **named: Any,
    ) -> Any:  # fmt: skip
        """Record an op of a graph with a backward function whose ops are recorded as its gradient ops."""
        first_output: Any = output_tensors[0] if output_tensors else None
        if not _is_of_graph_op(first_output):
            return original(op_type, output_tensors, input_tensors, backward_function, *positional, **named)
        # A strong reference would keep the graph alive as long as the tape's record.
        producer_reference = weakref.ref(first_output.op)

        def recording_backward(*gradients: Any) -> Any:
            with _record_gradient_ops_of(producer_reference()):
                return backward_function(*gradients)

        return original(op_type, output_tensors, input_tensors, recording_backward, *positional, **named)

    return record_operation


def _patch_function_gradients(patches: Patches) -> None:
    """Patch the gradients of calls of functions by `tf.gradients`."""
    holder = concrete_function._DelayedRewriteGradientFunctions
    rewrite = holder._rewrite_forward_and_call_backward

    @functools.wraps(rewrite)
    def rewrite_forward_and_call_backward(self: Any, op: Any, *doutputs: Any) -> Any:
        with _record_gradient_ops_of(op):
            return rewrite(self, op, *doutputs)

    patches.set(holder, "_rewrite_forward_and_call_backward", rewrite_forward_and_call_backward)
