"""Traceable routines as functions, which TensorFlow calls and inlines."""

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
from ._side import dtype_enum
from ._slots import RoutineNode
from ._values import GraphTensors

_TENSORS = GraphTensors()


class TracedRoutine:
    """The routines of a node as a function.

    definitions: FunctionDefs of the functions that it calls, and at last its own.
    constants: eager tensors that the routines read, which are the function's last arguments.
    """

    def __init__(self, place: RoutineNode, tensors: Sequence[Any], rewriting: Rewriting) -> None:
        graph = func_graph.FuncGraph("amanda_routine")
        with graph.as_default():
            placeholders = [
                tf.compat.v1.placeholder(tensor.dtype.base_dtype, tensor.shape) for tensor in tensors
            ]
            graph.inputs = list(placeholders)
            graph.outputs = self._outputs(place, placeholders, rewriting)
        self.constants = []
        for external, _ in graph.captures:  # the graph has appended them to its inputs
            # Captured tensors become constants of the graph, which a variable cannot be.
            if not isinstance(external, ops.EagerTensor) or external.dtype in (tf.resource, tf.variant):
                raise NotImplementedError("it reads a variable")
            self.constants.append(external)
        self.stateful = any(op._is_stateful for op in graph.get_operations() if op.type != "Placeholder")
        atomic = atomic_function.from_func_graph(f"__amanda_routine_{id(graph)}", graph, {})
        definition = atomic.definition
        # The name must not enter the digest of the content, which becomes the name: equal functions are
        # shared.
        definition.signature.name = ""
        content = digest(definition.SerializeToString(deterministic=True))
        definition.signature.name = f"amanda_routine_{content:016x}"
        callees = [function.definition for function in graph._functions.values()]
        self.definitions = [*callees, definition]
        self.types = [dtype_enum(tensor) for tensor in graph.inputs]

    @staticmethod
    def _outputs(place: RoutineNode, inputs: list[Any], rewriting: Rewriting) -> list[Any]:
        if place.replaces:
            flat = place.run_replacement(place.actions[0], _TENSORS, inputs, {})
        else:
            flat = place.apply(place.actions, place.values(inputs), _TENSORS, rewriting.state, {})
        return [tf.identity(tf.cast(output, dtype)) for output, dtype in zip(flat, place.dtypes, strict=True)]

    def call(
        self,
        name: str,
        inputs: Sequence[str],
        control_inputs: Sequence[str],
        result_types: Sequence[int],
        output: str,
    ) -> list[Any]:
        """Return the nodes of the constants, and the node that calls the function.

        output: the suffix of a constant's output, as an input spells it.
        """
        nodes = [constant(f"{name}/constant{i}", value.numpy()) for i, value in enumerate(self.constants)]
        kind = "StatefulPartitionedCall" if self.stateful else "PartitionedCall"
        constant_refs = (f"{node.name}{output}" for node in nodes)
        call = new_node(name, kind, [*inputs, *constant_refs, *control_inputs])
        call.attr["f"].func.name = self.definitions[-1].signature.name
        for attribute, types in (("Tin", self.types), ("Tout", result_types)):
            call.attr[attribute].list.CopyFrom(attr_value_pb2.AttrValue.ListValue(type=list(types)))
        for attribute in ("config", "config_proto", "executor_type"):
            call.attr[attribute].s = b""
        return [*nodes, call]
