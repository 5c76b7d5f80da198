"""Which nodes of a rewritten graph run as hidden copies: those whose kernels hold state stay the user's.

Copied nodes find state that has a name, such as variables, by that name. State within a kernel (generators,
iterators, queues, tables) cannot be copied: such nodes, and all nodes that they depend on, stay the user's,
and copied nodes read them. A random op that has to be copied draws from the user's op.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple
from weakref import ref

import tensorflow as tf
from amanda.backend import Execution
from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client import pywrap_tf_session as c_api
from tensorflow.python.framework import op_def_registry

from ..graph import py_func


class Partition(NamedTuple):
    """The nodes of a rewritten graph that run as copies.

    copied: these nodes, in order.  restarted: those among them whose state begins anew in the copy.
    """

    copied: list[Any]
    restarted: list[Any]


def partition(vanilla_nodes: Mapping[str, Any], rewritten: Sequence[Any]) -> Partition:
    """Divide rewritten nodes; no node is copied if none differs from the user's.

    vanilla_nodes: the user's nodes by name.
    """
    changed_names = _changed_names(vanilla_nodes, rewritten)
    if not changed_names:
        return Partition(copied=[], restarted=[])
    stateful_nodes = [node for node in rewritten if holds_state(node)]
    # The kernels of these nodes hold state that the program goes on using, so they run, not copies of them;
    # and what they depend on has to run before them.
    unchanged_stateful_names = [node.name for node in stateful_nodes if node.name not in changed_names]
    uncopied_names = _ancestors(unchanged_stateful_names, rewritten)
    return Partition(
        copied=[node for node in rewritten if node.name not in uncopied_names],
        restarted=[node for node in stateful_nodes if node.name in changed_names],
    )


def source_name(text: str) -> str:
    """Return the name of the node that an input reads or waits for."""
    return text.removeprefix("^").partition(":")[0]


def holds_state(node: Any) -> bool:
    """Return True if a node's kernel holds state that no other kernel finds by a name."""
    kind = _state_kind(node.op)
    return kind == "kernel" or (kind == "named" and not node.attr["shared_name"].s)


# A copy of a variable finds the variable: it gets the original's name as its `shared_name`.
_BY_NODE_NAME = ("Variable", "VariableV2")


@cache
def _state_kind(type: str) -> str:
    """Return where an op keeps state: "kernel", "named" (by its attribute shared_name), or "" for none."""
    definition = op_def_registry.get(type)
    if definition is None or not definition.is_stateful or type in _BY_NODE_NAME:
        return ""
    attributes = {argument.name for argument in definition.attr}
    if type == "VarHandleOp":
        return "named"
    # Kernels of seeded random ops hold the state of their generator.
    if {"seed", "seed2"} <= attributes:
        return "kernel"
    # An op without inputs that returns a resource has created it in its kernel.
    returns_handle = any(
        argument.is_ref or argument.type == types_pb2.DT_RESOURCE for argument in definition.output_arg
    )
    return "kernel" if returns_handle and not definition.input_arg else ""


def _changed_names(vanilla_nodes: Mapping[str, Any], rewritten: Sequence[Any]) -> set[str]:
    """Return the names of nodes that are changed, new, or depend on such a node."""
    readers: dict[str, list[str]] = defaultdict(list)
    pending_names: list[str] = []
    for node in rewritten:
        for text in node.input:
            readers[source_name(text)].append(node.name)
        vanilla = vanilla_nodes.get(node.name)
        if vanilla is None or (vanilla is not node and vanilla != node):
            pending_names.append(node.name)
    changed_names = set(pending_names)
    while pending_names:
        for name in readers[pending_names.pop()]:
            if name not in changed_names:
                changed_names.add(name)
                pending_names.append(name)
    return changed_names


def _ancestors(names: Iterable[str], nodes: Sequence[Any]) -> Collection[str]:
    """Return the names of nodes, and of all nodes that they depend on."""
    by_name = {node.name: node for node in nodes}
    ancestors = set(names)
    pending_names = list(ancestors)
    while pending_names:
        for text in by_name[pending_names.pop()].input:
            name = source_name(text)
            if name in by_name and name not in ancestors:
                ancestors.add(name)
                pending_names.append(name)
    return ancestors


_OPTIONS = config_pb2.RunOptions(inter_op_thread_pool=-1).SerializeToString()
"""Options for a run within a run: on the calling thread, since no other thread may be free."""


class SessionExecution(Execution):
    """An execution of a session's run.

    session: a weak reference to the session.
    """

    session: ref[Any]


class OriginalDraw:
    """Runs a random operation of the user's graph on the inputs of its copy."""

    def __init__(self, name: str) -> None:
        self._name = name

    def run(self, execution: Any, values: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Run the operation in the user's session, on these inputs; return its outputs as eager tensors."""
        session = execution.session()
        op = session.graph.get_operation_by_name(self._name)
        feeds = {
            tensor._as_tf_output(): value.numpy() for tensor, value in zip(op.inputs, values, strict=True)
        }
        fetches = [tensor._as_tf_output() for tensor in op.outputs]
        options = c_api.TF_NewBufferFromString(_OPTIONS)
        try:
            # The C API, since the stand-ins would take this run within a run for one of the program's.
            values_drawn = c_api.TF_SessionRun_wrapper(session._session, options, feeds, fetches, [], None)
        finally:
            c_api.TF_DeleteBuffer(options)
        return [
            tf.constant(value, tensor.dtype) for value, tensor in zip(values_drawn, op.outputs, strict=True)
        ]


def can_run_alone(op: Any) -> bool:
    """Return True if an operation can run by itself, on values fed for all its inputs."""
    has_plain_tensors = all(
        tensor.dtype not in (tf.resource, tf.variant) and not tensor.dtype._is_ref_dtype
        for tensor in (*op.inputs, *op.outputs)
    )
    return has_plain_tensors and bool(op.inputs) and not op.control_inputs


def draw_node(node: Any, op: Any, slot: int, number: str) -> Any:
    """Return a node that takes the place of a random op's copy: with the same name, inputs and outputs."""
    input_types = [tensor.dtype.base_dtype.as_datatype_enum for tensor in op.inputs]
    result_types = [tensor.dtype.base_dtype.as_datatype_enum for tensor in op.outputs]
    return py_func(node.name, slot, [number, *node.input], input_types, result_types)
