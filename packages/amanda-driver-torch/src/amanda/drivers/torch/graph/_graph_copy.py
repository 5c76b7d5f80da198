"""A copy of an FX graph in which nodes with routines take the place of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule

from ._ops import GraphProgram, custom_ops

if TYPE_CHECKING:
    from torch.fx import Node

    from ._instrumented import InstrumentedCall


class GraphCopy:
    """Copy of a graph, in which nodes are replaced.

    calls_python: whether a routine is called as Python.  The copy then makes a token for each execution.
    """

    def __init__(self, module: GraphModule, program: GraphProgram, calls_python: bool) -> None:
        """Copy the graph, with what dynamo has left on the module and on the nodes."""
        self._twins: dict[Node, Node] = {}
        self._held_nodes: dict[int, Node] = {}
        graph = Graph()
        copied: Any = graph.graph_copy(module.graph, self._twins, return_output_node=True)
        output, output_node = copied  # without its output node, whose metadata is copied below
        graph.output(output).meta = copy(output_node.meta)
        graph._codegen = module.graph._codegen
        self._module = GraphModule(module, graph, type(module).__name__)
        # Backends read what dynamo leaves on the module and on the nodes; graph_copy copies neither.
        for name, value in vars(module).items():
            self._module.__dict__.setdefault(name, value)
        for node, twin in self._twins.items():
            if hasattr(node, "_dynamo_source"):
                twin._dynamo_source = node._dynamo_source
        self._first = next(node for node in graph.nodes if node.op != "placeholder")
        self._token: Node | None = None
        if calls_python:
            with graph.inserting_before(self._first):
                self._token = graph.call_function(custom_ops().begin.default, (program.number,))

    def replace_node(
        self, node: Node, instrumented: InstrumentedCall, attributes: Sequence[str] = ()
    ) -> None:
        """Replace a node by a call, with the node's inputs and attributes of the module."""
        twin = self._twins[node]
        inputs = list(twin.all_input_nodes)
        inputs += [self._attribute(name) for name in attributes]
        with self._module.graph.inserting_before(twin):
            call_node = self._insert_call(instrumented, inputs)
        call_node.meta = copy(twin.meta)
        twin.replace_all_uses_with(call_node)
        if twin is self._first:
            self._first = call_node  # an erased node cannot mark where to insert others
        self._module.graph.erase_node(twin)

    def insert_before_readers(self, node: Node, instrumented: InstrumentedCall) -> None:
        """Insert a call between a node and all its readers."""
        twin = self._twins[node]
        readers = list(twin.users)
        with self._module.graph.inserting_before(self._first if twin.op == "placeholder" else twin.next):
            call_node = self._insert_call(instrumented, [twin])
        call_node.meta = copy(twin.meta)
        for reader in readers:
            reader.replace_input_with(twin, call_node)

    def replace_bodies(
        self,
        node: Node,
        bodies: Mapping[str, GraphModule],
        position: int,
        held_tensors: Sequence[torch.Tensor],
    ) -> None:
        """Replace bodies of a higher-order op by name, and append tensors to the operands at a position."""
        twin = self._twins[node]
        args: list[Any] = list(twin.args)
        for name, body in bodies.items():
            new_name = f"amanda_{name}_{node.name}"
            setattr(self._module, new_name, body)
            with self._module.graph.inserting_before(twin):
                body_node = self._module.graph.get_attr(new_name)
            args = [body_node if getattr(arg, "target", None) == name else arg for arg in args]
        args[position] = (*args[position], *(self._node_of_held_tensor(tensor) for tensor in held_tensors))
        twin.args = tuple(args)

    def insert_before_output(self, instrumented: InstrumentedCall) -> bool:
        """Insert a call on the first output of the graph; return False if the graph has no output."""
        output = next(iter(reversed(self._module.graph.nodes)))
        outputs = output.all_input_nodes[:1]
        for value in outputs:
            with self._module.graph.inserting_before(output):
                call_node = self._insert_call(instrumented, [value])
            call_node.meta = copy(value.meta)
            output.replace_input_with(value, call_node)
        return bool(outputs)

    def finish(self) -> GraphModule:
        """Return the copy as a module."""
        self._module.graph.lint()
        self._module.recompile()
        return self._module

    def _insert_call(self, instrumented: InstrumentedCall, inputs: Sequence[Node]) -> Node:
        """Insert a call on the token, on the tensors that its routines hold, and on inputs."""
        held_nodes = [self._node_of_held_tensor(tensor) for tensor in instrumented.held_tensors.tensors]
        return self._module.graph.call_function(instrumented, (self._token, *held_nodes, *inputs))

    def _node_of_held_tensor(self, tensor: torch.Tensor) -> Node:
        """Return the node of a tensor that routines hold, which becomes an attribute of the module."""
        if id(tensor) not in self._held_nodes:
            name = f"amanda_held_{len(self._held_nodes)}"
            if isinstance(tensor, torch.nn.Parameter):
                self._module.register_parameter(name, tensor)
            else:
                self._module.register_buffer(name, tensor, persistent=False)  # not in the state_dict
            self._held_nodes[id(tensor)] = self._attribute(name)
        return self._held_nodes[id(tensor)]

    def _attribute(self, name: str) -> Node:
        # Before all calls, as the same tensor may be held by several of them.
        with self._module.graph.inserting_before(self._token or self._first):
            return self._module.graph.get_attr(name)
