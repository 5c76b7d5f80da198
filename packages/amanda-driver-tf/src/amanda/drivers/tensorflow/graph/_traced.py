"""Routines that are pure tensor code, as functions that TensorFlow calls and inlines itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from amanda.backend import Action, OpFacts, digest
from tensorflow.core.framework import attr_value_pb2, node_def_pb2
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import func_graph, ops, tensor_util

from ._body import Rewriting
from ._side import enum
from ._slots import Node
from ._values import GraphTensors

_TENSORS = GraphTensors()


class Traced:
    """Routines of one place as a function.

    definitions: of the function, which comes last, and of those that it calls.
    held: tensors that the routines hold, which are its last arguments.
    """

    def __init__(self, node: Node, tensors: Sequence[Any], rewriting: Rewriting) -> None:
        graph = func_graph.FuncGraph("amanda_routine")
        with graph.as_default():
            given = [tf.compat.v1.placeholder(one.dtype.base_dtype, one.shape) for one in tensors]
            graph.inputs = list(given)
            graph.outputs = self._outputs(node, given, rewriting)
        self.held = []
        for external, _ in graph.captures:  # the graph has appended them to its inputs
            if not isinstance(external, ops.EagerTensor) or external.dtype in (tf.resource, tf.variant):
                raise NotImplementedError("it reads a variable")
            self.held.append(external)
        self.stateful = any(op._is_stateful for op in graph.get_operations() if op.type != "Placeholder")
        atomic = atomic_function.from_func_graph(f"__amanda_routine_{id(graph)}", graph, {})
        definition = atomic.definition
        definition.signature.name = ""
        content = digest(definition.SerializeToString(deterministic=True))
        definition.signature.name = f"amanda_routine_{content:016x}"
        called = [one.definition for one in graph._functions.values()]
        self.definitions = [*called, definition]
        self.types = [enum(tensor) for tensor in graph.inputs]

    @staticmethod
    def _outputs(node: Node, given: list[Any], rewriting: Rewriting) -> list[Any]:
        if node.actions[0].type.is_replacement:
            flat = node.replaced(node.actions[0], _TENSORS, given, {})
        else:
            flat = node.apply(node.actions, node.values(given), _TENSORS, rewriting.state, {})
        return [tf.identity(tf.cast(one, dtype)) for one, dtype in zip(flat, node.dtypes, strict=True)]

    def call(self, name: str, inputs: Sequence[str], waits: Sequence[str], gives: Sequence[int]) -> list[Any]:
        """The node that calls the function, after those of its constants."""
        nodes = [constant(f"{name}/constant{i}", one.numpy()) for i, one in enumerate(self.held)]
        kind = "StatefulPartitionedCall" if self.stateful else "PartitionedCall"
        node = node_def_pb2.NodeDef(name=name, op=kind)
        node.input.extend([*inputs, *(f"{one.name}{self.written}" for one in nodes), *waits])
        node.attr["f"].func.name = self.definitions[-1].signature.name
        for attribute, types in (("Tin", self.types), ("Tout", gives)):
            node.attr[attribute].list.CopyFrom(attr_value_pb2.AttrValue.ListValue(type=list(types)))
        for attribute in ("config", "config_proto", "executor_type"):
            node.attr[attribute].s = b""
        return [*nodes, node]

    written = ""


def traced(node: Node, tensors: Sequence[Any], rewriting: Rewriting) -> Traced | None:
    """The routines of a place as a function; None where they have to run as Python, which is said."""
    if not all(action.traceable and not action.takes_run for action in node.actions):
        for action in node.actions:
            if action.takes_run:
                tell_python(action, node.facts, "it takes `run`, which belongs to one execution", rewriting)
        return None
    restless = rewriting.restless(node.actions[0])
    if restless:
        for action in node.actions:
            tell_python(action, node.facts, f"what it reads changes often: {restless}", rewriting)
        return None
    try:
        with rewriting.reads.tracing(node.actions):
            made = Traced(node, tensors, rewriting)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        for action in node.actions:
            tell_python(action, node.facts, f"it cannot be traced: {reason}", rewriting)
        return None
    rewriting.traced += [(action, made.held) for action in node.actions]
    return made


def tell_python(action: Action, facts: OpFacts, why: str, rewriting: Rewriting) -> None:
    """Report that a traceable routine runs as Python; where none may, it is refused."""
    if rewriting.written:
        rewriting.refuse([action], facts, why)
    elif action.traceable:
        rewriting.report(f"traceable {action}", f"{why}, so it runs as Python")


def constant(name: str, value: Any) -> Any:
    """A node that gives a value."""
    node = node_def_pb2.NodeDef(name=name, op="Const")
    node.attr["value"].tensor.CopyFrom(tensor_util.make_tensor_proto(value))
    node.attr["dtype"].type = node.attr["value"].tensor.dtype
    return node
