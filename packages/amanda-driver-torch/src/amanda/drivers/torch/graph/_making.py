"""A copy of an FX graph in which nodes with routines take the place of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule

from ._ops import Program, custom_ops

if TYPE_CHECKING:
    from torch.fx import Node

    from ._instrumented import Inlet


class Making:
    """The copy, while it is made.

    calls_python: whether a routine is called as Python, so that an execution has to be told from others.
    """

    def __init__(self, module: GraphModule, program: Program, calls_python: bool) -> None:
        self._twins: dict[Node, Node] = {}
        self._held: dict[int, Node] = {}
        graph = Graph()
        copied: Any = graph.graph_copy(module.graph, self._twins, return_output_node=True)
        output, last = copied
        graph.output(output).meta = copy(last.meta)
        graph._codegen = module.graph._codegen
        self._module = GraphModule(module, graph, type(module).__name__)
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

    def replace(self, node: Node, inlet: Inlet, attributes: Sequence[str] = ()) -> None:
        """Call something instead of a node, with what that is given and attributes of the module."""
        twin = self._twins[node]
        inputs = list(twin.all_input_nodes)
        inputs += [self._attribute(name) for name in attributes]
        with self._module.graph.inserting_before(twin):
            made = self._call(inlet, inputs)
        made.meta = copy(twin.meta)
        twin.replace_all_uses_with(made)
        if twin is self._first:
            self._first = made  # what is erased marks no place
        self._module.graph.erase_node(twin)

    def read_through(self, node: Node, inlet: Inlet) -> None:
        """Replace a node's value, for all that reads it, by what something makes of it."""
        twin = self._twins[node]
        readers = list(twin.users)
        with self._module.graph.inserting_before(self._first if twin.op == "placeholder" else twin.next):
            made = self._call(inlet, [twin])
        made.meta = copy(twin.meta)
        for reader in readers:
            reader.replace_input_with(twin, made)

    def end_with(self, inlet: Inlet) -> bool:
        """Have something run last, on a value that the graph gives; False where the graph gives none."""
        output = next(iter(reversed(self._module.graph.nodes)))
        given = output.all_input_nodes[:1]
        for one in given:
            with self._module.graph.inserting_before(output):
                made = self._call(inlet, [one])
            made.meta = copy(one.meta)
            output.replace_input_with(one, made)
        return bool(given)

    def finished(self) -> GraphModule:
        """The copy."""
        self._module.graph.lint()
        self._module.recompile()
        return self._module

    def _call(self, inlet: Inlet, inputs: Sequence[Node]) -> Node:
        held = [self._holding(tensor) for tensor in inlet.held.tensors]
        return self._module.graph.call_function(inlet, (self._token, *held, *inputs))

    def _holding(self, tensor: torch.Tensor) -> Node:
        """The node of a tensor that routines hold, which becomes the module's."""
        if id(tensor) not in self._held:
            name = f"amanda_held_{len(self._held)}"
            if isinstance(tensor, torch.nn.Parameter):
                self._module.register_parameter(name, tensor)
            else:
                self._module.register_buffer(name, tensor, persistent=False)
            self._held[id(tensor)] = self._attribute(name)
        return self._held[id(tensor)]

    def _attribute(self, name: str) -> Node:
        with self._module.graph.inserting_before(self._token or self._first):
            return self._module.graph.get_attr(name)
