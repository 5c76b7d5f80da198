"""The forward operation that a gradient operation belongs to: by records, else by names."""

import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

_GRADIENT_SCOPE = re.compile(r"(?:^|/)gradients(?:_\d+)?/")
_OF_ONE = re.compile(r"_grad(?:_\d+)?(?:/|$)")
_TAPE_SCOPE = re.compile(r"(?:^|.*?/)gradient_tape/(?:(.*)/)?[^/]*$")

_DEEPEST = 18
_GRADIENT_PASSES = frozenset({"Identity", "Snapshot", "EnsureShape"})
"""Ops that no gradient operation is made for."""
_ADDS_OR_SHAPES = frozenset(
    {"Add", "AddN", "AddV2", "BiasAdd", "ExpandDims", "Reshape", "Squeeze", "Sub", "Transpose"}
)
"""Ops whose gradient is no product."""


class _Records:
    """Forward operations of gradient operations, noted when TensorFlow made those."""

    def __init__(self) -> None:
        self._forward: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()

    def note(self, op: tf.Operation, forward: tf.Operation) -> None:
        """Note that `op` was made to compute a gradient of `forward`."""
        if op is not forward and op not in self._forward:
            self._forward[op] = weakref.ref(forward)

    def get(self, op: tf.Operation) -> tf.Operation | None:
        """The forward operation; None where none was noted."""
        known = self._forward.get(op)
        return op._original_op if known is None else known()


records = _Records()


class ForwardMap:
    """The forward operation of each gradient operation of a graph.

    ops: the graph's operations, in order.
    forward_ops: those of the graph that was differentiated, by name; the graph's own by default.
    captured: of a placeholder, the tensor of the forward graph that it stands for; None for others.
    default: what operations of which nothing is known belong to: the call of a graph of gradients.
    apart: whether the forward operations are in another graph.
    guessed: operations whose forward operation only names tell.
    """

    def __init__(
        self,
        ops: Sequence[tf.Operation],
        forward_ops: Mapping[str, tf.Operation] | None = None,
        captured: Callable[[Any], Any] = lambda tensor: None,
        default: tf.Operation | None = None,
        apart: bool = False,
    ) -> None:
        self._by_name = {op.name: op for op in ops} if forward_ops is None else forward_ops
        self._captured = captured
        self.guessed: list[tf.Operation] = []
        self._forward: dict[tf.Operation, tf.Operation] = {}
        self._order = {op: i for i, op in enumerate(ops)}
        self._consumers: dict[tf.Operation, list[tf.Operation]] = {}
        self._by_scope: dict[str, list[tf.Operation]] | None = None
        own = {} if apart or default is not None else {op.name: op for op in ops}
        for op in ops:
            found = self._recorded(op, own) or self._of_call(op) or self._by_names(op) or default
            if found is not None and found is not op:
                self._forward[op] = found
        self._add_sums(ops)

    def __call__(self, op: tf.Operation) -> tf.Operation | None:
        """The forward operation; of gradients of gradients the first one."""
        return self._line(op)[-1]

    def order(self, op: tf.Operation) -> int:
        """1 for a gradient operation, 2 for one of gradients of gradients, and so on."""
        return len(self._line(op)) - 1

    def _line(self, op: tf.Operation) -> list[tf.Operation | None]:
        """The operation that each one computes gradients of, up to the first; None if there is none."""
        found = self._forward.get(op)
        line = [None, found] if found is not None else [None]
        while found is not None and len(line) < _DEEPEST:
            found = self._forward.get(found) or records.get(found)
            if found is not None:
                line.append(found)
        return line

    @staticmethod
    def _recorded(op: tf.Operation, own: Mapping[str, tf.Operation]) -> tf.Operation | None:
        """Return what was noted; in TensorFlow's copy of a graph, the copy's operation of that name."""
        found = records.get(op)
        if found is None or found.graph is op.graph:
            return found
        twin = own.get(found.name)
        return found if twin is None or twin.type != found.type else twin

    def _of_call(self, op: tf.Operation) -> tf.Operation | None:
        """The call of a forward function, of a call of its backward function, which reads its results."""
        if not _calls(op, "__backward_"):
            return None
        held = (self._captured(tensor) for tensor in op.inputs)
        read = [tensor.op if one is None else one.op for tensor, one in zip(op.inputs, held, strict=True)]
        return next((one for one in reversed(read) if _calls(one, "__forward_")), None)

    def _by_names(self, op: tf.Operation) -> tf.Operation | None:
        match = _TAPE_SCOPE.match(op.name)
        found = self._by_scope_of_gradients(op)
        if found is None and match is not None:
            found = self._as_what_it_reads(op) or self._by_structure(op, match.group(1) or "")
        if found is not None:
            self.guessed.append(op)
        return found

    def _by_scope_of_gradients(self, op: tf.Operation) -> tf.Operation | None:
        """The operation whose name, with "_grad", is the scope; scopes of gradients may be in one another."""
        for scope in reversed(list(_GRADIENT_SCOPE.finditer(op.name))):
            for end in reversed(list(_OF_ONE.finditer(op.name, scope.end()))):
                found = self._by_name.get(op.name[scope.end() : end.start()])
                if found is not None:
                    return found
        return None

    def _as_what_it_reads(self, op: tf.Operation) -> tf.Operation | None:
        """The operation of a factor that was computed from its tensors alone, such as cos for sin."""
        for tensor in op.inputs:
            found = self._forward.get(tensor.op)
            if found is not None and len(tensor.op.inputs) > 0:
                own = {_key(one) for one in (*found.inputs, *found.outputs)}
                if all(self._key_of(one) in own for one in tensor.op.inputs):
                    return found
        return None

    def _key_of(self, tensor: Any) -> tuple[Any, int]:
        held = self._captured(tensor)
        return _key(tensor if held is None else held)

    def _by_structure(self, op: tf.Operation, scope: str) -> tf.Operation | None:
        """The operation of that name scope which shares most tensors with the gradient operation."""
        reads = {self._key_of(tensor) for tensor in op.inputs}
        best: tuple[int, tf.Operation | None] = (0, None)
        here = self._order[op]
        for candidate in self._in_scope(scope):
            if self._order.get(candidate, -1) > here:
                continue  # it was made later
            if candidate.type in _GRADIENT_PASSES or (op.type == "Mul" and candidate.type in _ADDS_OR_SHAPES):
                continue
            shared = sum(_key(one) in reads for one in (*candidate.inputs, *candidate.outputs))
            score = 2 * shared + 3 * op.type.startswith(candidate.type)
            if score >= max(best[0], 1):
                best = (score, candidate)
        return best[1]

    def _in_scope(self, scope: str) -> list[tf.Operation]:
        if self._by_scope is None:
            self._by_scope = {}
            for name, op in self._by_name.items():
                if "gradient_tape/" not in name:
                    self._by_scope.setdefault(name.rpartition("/")[0], []).append(op)
                    self._by_scope.setdefault(name, []).append(op)
        return self._by_scope.get(scope, [])

    def _add_sums(self, ops: Iterable[tf.Operation]) -> None:
        """Map sums of gradients to the operation whose output they are the gradient of."""
        sums = [op for op in ops if op.type == "AddN" and op not in self._forward]
        if not sums:
            return
        for op in self._order:
            for tensor in op.inputs:
                self._consumers.setdefault(tensor.op, []).append(op)
        for op in sums:
            made = [self._forward[tensor.op] for tensor in op.inputs if tensor.op in self._forward]
            if len(made) == len(op.inputs):
                read = [self._forward[one] for one in self._consumers.get(op, ()) if one in self._forward]
                readers = [one for one in read if self._order.get(one, -1) < self._order[op]]
                self._forward[op] = readers[0] if readers else made[0]


def _calls(op: tf.Operation, kind: str) -> bool:
    """Return whether an operation calls a function of this kind."""
    if op.type not in ("PartitionedCall", "StatefulPartitionedCall"):
        return False
    name: str = op.get_attr("f").name
    return kind in name


def _key(tensor: Any) -> tuple[Any, int]:
    return (tensor.op, tensor.value_index)
