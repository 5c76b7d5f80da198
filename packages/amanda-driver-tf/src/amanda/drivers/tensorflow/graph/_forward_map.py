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
        self._forward: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()

    def record(self, op: tf.Operation, forward: tf.Operation) -> None:
        """Record that `op` computes a gradient of `forward`."""
        if op is not forward and op not in self._forward:
            self._forward[op] = weakref.ref(forward)

    def get(self, op: tf.Operation) -> tf.Operation | None:
        """Return the forward operation; None where none was recorded."""
        reference = self._forward.get(op)
        # TensorFlow itself records the forward op of `tf.gradients`, not of tapes.
        return op._original_op if reference is None else reference()


records = _Records()


class ForwardMap:
    """The forward operation of each gradient operation of a graph.

    ops: the graph's operations, in order.
    forward_ops: the operations of the differentiated graph by name; by default those of this graph.
    captured: returns the forward graph's tensor that a placeholder stands for; None for other tensors.
    default: the forward operation of operations without any hint: the call of a graph of gradients.
    forward_is_elsewhere: True if the forward operations are in another graph.
    guessed: operations whose forward operation was inferred from names.
    """

    def __init__(
        self,
        ops: Sequence[tf.Operation],
        forward_ops: Mapping[str, tf.Operation] | None = None,
        captured: Callable[[Any], Any] = lambda tensor: None,
        default: tf.Operation | None = None,
        forward_is_elsewhere: bool = False,
    ) -> None:
        self._by_name = {op.name: op for op in ops} if forward_ops is None else forward_ops
        self._captured = captured
        self.guessed: list[tf.Operation] = []
        self._forward: dict[tf.Operation, tf.Operation] = {}
        self._order = {op: i for i, op in enumerate(ops)}
        self._consumers: dict[tf.Operation, list[tf.Operation]] = {}
        self._by_scope: dict[str, list[tf.Operation]] | None = None
        ops_by_name = {} if forward_is_elsewhere or default is not None else {op.name: op for op in ops}
        for op in ops:
            forward = (
                self._recorded_forward(op, ops_by_name)
                or self._called_forward(op)
                or self._forward_by_names(op)
                or default
            )
            if forward is not None and forward is not op:
                self._forward[op] = forward
        self._map_sums(ops)

    def __call__(self, op: tf.Operation) -> tf.Operation | None:
        """Return the forward operation; for gradients of gradients, the first one."""
        return next(reversed(self._forward_chain(op)), None)

    def order(self, op: tf.Operation) -> int:
        """Return 1 for a gradient operation, 2 for one of second gradients, and so on; 0 for others."""
        return len(self._forward_chain(op))

    def _forward_chain(self, op: tf.Operation) -> list[tf.Operation]:
        """Return the forward operation, then the forward operation of that, and so on."""
        chain: list[tf.Operation] = []
        forward = self._forward.get(op)
        while forward is not None and len(chain) < _MAX_ORDER:
            chain.append(forward)
            # The operations of another graph are in the records alone.
            forward = self._forward.get(forward) or records.get(forward)
        return chain

    @staticmethod
    def _recorded_forward(op: tf.Operation, ops_by_name: Mapping[str, tf.Operation]) -> tf.Operation | None:
        """Return the recorded operation; in TensorFlow's copy of a graph, the copy's of that name."""
        forward = records.get(op)
        if forward is None or forward.graph is op.graph:
            return forward
        # The operations of a graph that TensorFlow has copied have no records; their originals have.
        twin = ops_by_name.get(forward.name)
        return forward if twin is None or twin.type != forward.type else twin

    def _called_forward(self, op: tf.Operation) -> tf.Operation | None:
        """Return the call of a forward function for a call of its backward function, else None.

        The backward function reads results of the forward function.
        """
        if not _calls_function(op, "__backward_"):
            return None
        captured = (self._captured(tensor) for tensor in op.inputs)
        read_ops = [
            tensor.op if source is None else source.op
            for tensor, source in zip(op.inputs, captured, strict=True)
        ]
        return next((source for source in reversed(read_ops) if _calls_function(source, "__forward_")), None)

    def _forward_by_names(self, op: tf.Operation) -> tf.Operation | None:
        """Infer the forward operation of an operation from names and tensors; None if that fails.

        An operation with a forward operation is added to `guessed`.
        """
        match = _TAPE_SCOPE.match(op.name)
        forward = self._forward_by_gradient_scope(op)
        if forward is None and match is not None:
            scope = match.group(1) or ""
            forward = self._forward_of_factor(op) or self._forward_by_shared_tensors(op, scope)
        if forward is not None:
            self.guessed.append(op)
        return forward

    def _forward_by_gradient_scope(self, op: tf.Operation) -> tf.Operation | None:
        """Return the operation "x" for a name scope "gradients/x_grad"; such scopes may be nested."""
        # Innermost first: the gradient of a gradient belongs to the latter.
        for scope in reversed(list(_GRADIENT_SCOPE.finditer(op.name))):
            for end in reversed(list(_GRAD_SUFFIX.finditer(op.name, scope.end()))):
                forward = self._by_name.get(op.name[scope.end() : end.start()])
                if forward is not None:
                    return forward
        return None

    def _forward_of_factor(self, op: tf.Operation) -> tf.Operation | None:
        """Return the forward operation of an input that was computed from its tensors, as cos for sin."""
        for tensor in op.inputs:
            forward = self._forward.get(tensor.op)
            if forward is not None and len(tensor.op.inputs) > 0:
                forward_tensors = {_tensor_key(value) for value in (*forward.inputs, *forward.outputs)}
                if all(self._captured_key(operand) in forward_tensors for operand in tensor.op.inputs):
                    return forward
        return None

    def _captured_key(self, tensor: Any) -> tuple[Any, int]:
        """Return the key of the forward graph's tensor that a placeholder stands for, or of the tensor."""
        captured = self._captured(tensor)
        return _tensor_key(tensor if captured is None else captured)

    def _forward_by_shared_tensors(self, op: tf.Operation, scope: str) -> tf.Operation | None:
        """Return the operation of a name scope that shares most tensors with a gradient operation."""
        reads = {self._captured_key(tensor) for tensor in op.inputs}
        best_score, best_candidate = 1, None
        position = self._order[op]
        for candidate in self._ops_in_scope(scope):
            if self._order.get(candidate, -1) > position:
                continue  # a gradient comes after its forward operation
            if candidate.type in _WITHOUT_GRADIENT_OPS or (
                op.type == "Mul" and candidate.type in _WITHOUT_PRODUCTS
            ):
                continue
            shared = sum(_tensor_key(tensor) in reads for tensor in (*candidate.inputs, *candidate.outputs))
            # "Conv2DBackpropInput" begins with the type of its forward op, which says more than a shared
            # tensor.
            score = 2 * shared + 3 * op.type.startswith(candidate.type)
            if score >= best_score:  # of equal scores, the last operation wins
                best_score, best_candidate = score, candidate
        return best_candidate

    def _ops_in_scope(self, scope: str) -> list[tf.Operation]:
        """Return the forward operations in a name scope, or of that name."""
        if self._by_scope is None:
            self._by_scope = {}
            for name, op in self._by_name.items():
                if "gradient_tape/" not in name:
                    self._by_scope.setdefault(name.rpartition("/")[0], []).append(op)
                    self._by_scope.setdefault(name, []).append(op)
        return self._by_scope.get(scope, [])

    def _map_sums(self, ops: Iterable[tf.Operation]) -> None:
        """Map sums of gradients to the operation of whose output they are the gradient."""
        sums = [op for op in ops if op.type == "AddN" and op not in self._forward]
        if not sums:
            return
        for op in self._order:
            for tensor in op.inputs:
                self._consumers.setdefault(tensor.op, []).append(op)
        for op in sums:
            summand_forwards = [
                self._forward[tensor.op] for tensor in op.inputs if tensor.op in self._forward
            ]
            if len(summand_forwards) == len(op.inputs):
                reader_forwards = [
                    self._forward[reader] for reader in self._consumers.get(op, ()) if reader in self._forward
                ]
                # The operation that computed the output reads its gradient, and ran before the sum.
                producers = [
                    forward for forward in reader_forwards if self._order.get(forward, -1) < self._order[op]
                ]
                self._forward[op] = producers[0] if producers else summand_forwards[0]


def _calls_function(op: tf.Operation, kind: str) -> bool:
    """Return True if an operation calls a function with this text in its name."""
    if op.type not in ("PartitionedCall", "StatefulPartitionedCall"):
        return False
    name: str = op.get_attr("f").name
    return kind in name


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
    """Return a context in which created operations are recorded as gradients of an operation."""
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
        created = create(self, *args, **kwargs)
        if _differentiated.ops and _differentiated.ops[-1] is not None:
            records.record(created, _differentiated.ops[-1])
        return created

    patches.set(ops.Graph, "_original_op", original_op)
    patches.set(ops.Graph, "_create_op_internal", create_op_internal)


def _patch_tapes(patches: Patches) -> None:
    """Patch the recording of graph ops on tapes, and the gradient function that tapes call for them."""
    record = execute.record_gradient
    compute = backprop._gradient_function

    @functools.wraps(record)
    def record_gradient(op_name: str, inputs: Any, attrs: Any, outputs: Any) -> Any:
        """Stand-in for `record_gradient`: marks the record of a graph op with a reference to the op."""
        first = outputs[0] if isinstance(outputs, (list, tuple)) and outputs else None
        if first is not None and not isinstance(first, ops.EagerTensor) and hasattr(first, "op"):
            # A tape passes attributes to the gradient function unread; the stand-in below takes the mark out
            # again.
            attrs = (*(attrs or ()), _MARK, weakref.ref(first.op))
        return record(op_name, inputs, attrs, outputs)

    @functools.wraps(compute)
    def gradient_function(op_name: str, attr_tuple: Any, *positional: Any) -> Any:
        """Stand-in for `_gradient_function`: its ops are gradient ops of the op in the mark, if any."""
        if not attr_tuple or _MARK not in attr_tuple[-2:]:
            return compute(op_name, attr_tuple, *positional)
        with _record_gradient_ops_of(attr_tuple[-1]()):
            return compute(op_name, attr_tuple[:-2], *positional)

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


def _stand_in_for_record_operation(original: Any) -> Any:
    """Stand-in for `record_operation` and its variants: records which op the backward function is of."""

    @functools.wraps(original)
    def record_operation(
        op_type: Any, output_tensors: Any, input_tensors: Any, backward_function: Any, *positional: Any,
        **named: Any,
    ) -> Any:  # fmt: skip
        # Eager outputs have no op; an eager driver records theirs.
        first = output_tensors[0] if output_tensors else None
        if first is None or isinstance(first, ops.EagerTensor) or not hasattr(first, "op"):
            return original(op_type, output_tensors, input_tensors, backward_function, *positional, **named)
        # A strong reference would keep the graph alive as long as the tape's record.
        producer = weakref.ref(first.op)

        def backward(*gradients: Any) -> Any:
            with _record_gradient_ops_of(producer()):
                return backward_function(*gradients)

        return original(op_type, output_tensors, input_tensors, backward, *positional, **named)

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
