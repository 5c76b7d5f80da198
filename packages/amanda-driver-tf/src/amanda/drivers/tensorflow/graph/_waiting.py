"""Operations of a function that wait for the observers of earlier operations."""

from __future__ import annotations

from functools import reduce
from itertools import count
from operator import or_
from typing import Any

import tensorflow as tf

from ._body import Body
from ._nodes import op_def

# Stateful operations that never wait for another operation: those of variables and of random numbers.
_UNBLOCKED = (
    "Assert", "Assign", "CheckNumerics", "LookupTable", "Random", "ReadVariableOp", "ResourceApply",
    "ResourceGather", "ResourceScatter", "ResourceSparseApply", "ResourceStridedSliceAssign",
    "StatefulStandardNormal", "StatefulTruncatedNormal", "StatefulUniform", "TruncatedNormal",
    "VarHandleOp", "VarIsInitializedOp", "VariableShape",
)  # fmt: skip
_UNKNOWN = -1  # every bit


class SafeWaits:
    """The operations of a function that wait for nodes of observers, which cannot deadlock.

    An observer that runs late finds its tensors outside of the processor's caches, and operations cannot
    reuse their memory until then.  So an operation that reads an observed tensor waits for the node.

    node_names_by_op: by the name of an operation, the nodes for which it waits.
    """

    # An operation may block until another one runs, as a dequeue or a collective does. What waits for it must
    # not be waited for by the other one, so an operation waits for a node only if it depends already on each
    # operation that the node may be blocked by.

    def __init__(self, body: Body) -> None:
        self.node_names_by_op: dict[str, list[str]] = {}
        self._body = body
        self._blockers_by_op: dict[tf.Operation, int] | None = None
        self._packed_ops: dict[tf.Operation, None] = {}  # with observers at the next node
        self._node_name: str | None = None  # for which no operation waits yet
        self._observed_ops: dict[tf.Operation, None] = {}  # of that node
        self._blockers = 0  # of the nodes

    def add_op(self, op: tf.Operation) -> None:
        """Add an operation with observers, in their order; it waits for the last node if it may."""
        self._packed_ops[op] = None
        if self._node_name is not None and self._may_wait(op):
            self.node_names_by_op.setdefault(self._body.node_name(op), []).append(self._node_name)
            self._node_name = None

    def add_node(self, name: str) -> None:
        """Add the node of the observers at the operations that were added since the last node."""
        if self._blockers_by_op is None:
            self._blockers_by_op = _blockers_by_op(self._body)
        for op in self._packed_ops:
            self._blockers |= self._blockers_by_op.get(op, _UNKNOWN)
        self._node_name, self._observed_ops, self._packed_ops = name, self._packed_ops, {}

    def _may_wait(self, op: tf.Operation) -> bool:
        """Return True if an operation reads a result of an observed one, and may wait for the last node."""
        assert self._blockers_by_op is not None
        return (
            op not in self._observed_ops
            # It may be the condition of a loop; see `may_end_loop`.
            and all(output.dtype != tf.bool for output in op.outputs)
            and not self._blockers & ~self._blockers_by_op.get(op, 0)
            and any(tensor.op in self._observed_ops for tensor in op.inputs)
        )


def _blockers_by_op(body: Body) -> dict[tf.Operation, int]:
    """Return for each operation a bit for each operation that may block and that it depends on, or is.

    An argument of a called function counts as such an operation.  Operations that depend on a later
    operation are left out, and all with control flow of version 1, where a node may be dead.
    """
    if any(op.type in ("Merge", "RefMerge") for op in body.ops):
        return {}
    bits, ops = (1 << i for i in count()), set(body.ops)
    blockers_by_op: dict[tf.Operation, int] = {}
    called = 0
    for op in body.ops:
        calls = _calls_function(op)
        blockers = next(bits) if calls or _may_block(op) else 0
        sources = [*(tensor.op for tensor in op.inputs), *op.control_inputs]
        for argument in sources:
            if argument not in ops and argument not in blockers_by_op:
                is_late = body.is_called and argument.outputs[0].dtype != tf.resource
                blockers_by_op[argument] = next(bits) if is_late else 0
        if all(source in blockers_by_op for source in sources):
            blockers = reduce(or_, (blockers_by_op[source] for source in sources), blockers)
            if calls:  # calls of functions with routines wait for one another
                blockers = called = called | blockers
            blockers_by_op[op] = blockers
    return blockers_by_op


def _calls_function(op: tf.Operation) -> bool:
    """Return True for an operation with functions, whose operations may block; True if unknown."""
    definition: Any = op_def(op.type)
    return definition is None or any("func" in attribute.type for attribute in definition.attr)


def _may_block(op: tf.Operation) -> bool:
    """Return True for an operation that may wait for another one of which it reads nothing."""
    definition: Any = op_def(op.type)
    has_state = definition.is_stateful or any(argument.is_ref for argument in definition.input_arg)
    # Python may wait for anything, also where the program says that it has no state.
    return op.type == "PyFuncStateless" or (has_state and not op.type.startswith(_UNBLOCKED))
