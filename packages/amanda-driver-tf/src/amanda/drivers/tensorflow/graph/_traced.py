"""Routines that are pure tensor code, as functions that TensorFlow calls and inlines itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from amanda.backend import digest
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import func_graph, ops

from ._body import Rewriting
from ._nodes import constant, new_node
from ._side import enum
from ._slots import Node
from ._values import GraphTensors

_TENSORS = GraphTensors()


class Traced:
    """Routines of one place as a function.

    definitions: of the function, which comes last, and of those that it calls.
    held: tensors that the routines hold, which are its last arguments.
    """

    def __init__(self, place: Node, tensors: Sequence[Any], rewriting: Rewriting) -> None:
        graph = func_graph.FuncGraph("amanda_routine")
        with graph.as_default():
            given = [tf.compat.v1.placeholder(one.dtype.base_dtype, one.shape) for one in tensors]
            graph.inputs = list(given)
            graph.outputs = self._outputs(place, given, rewriting)
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
    def _outputs(place: Node, given: list[Any], rewriting: Rewriting) -> list[Any]:
        if place.replaces:
            flat = place.run_replacement(place.actions[0], _TENSORS, given, {})
        else:
            flat = place.apply(place.actions, place.values(given), _TENSORS, rewriting.state, {})
        return [tf.identity(tf.cast(one, dtype)) for one, dtype in zip(flat, place.dtypes, strict=True)]

    def call(
        self, name: str, inputs: Sequence[str], waits: Sequence[str], gives: Sequence[int], output: str
    ) -> list[Any]:
        """The node that calls the function, after those of its constants, whose `output` it reads."""
        nodes = [constant(f"{name}/constant{i}", one.numpy()) for i, one in enumerate(self.held)]
        kind = "StatefulPartitionedCall" if self.stateful else "PartitionedCall"
        held = (f"{one.name}{output}" for one in nodes)
        call = new_node(name, kind, [*inputs, *held, *waits])
        call.attr["f"].func.name = self.definitions[-1].signature.name
        for attribute, types in (("Tin", self.types), ("Tout", gives)):
            call.attr[attribute].list.CopyFrom(attr_value_pb2.AttrValue.ListValue(type=list(types)))
        for attribute in ("config", "config_proto", "executor_type"):
            call.attr[attribute].s = b""
        return [*nodes, call]
