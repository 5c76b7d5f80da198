"""Copies of an FX graph: with bodies in the place of their calls, and with routines in the place of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import count
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from ._ops import GraphProgram, custom_ops

if TYPE_CHECKING:
    from torch.fx import Node

    from ._instrumented import InstrumentedCall

_CHECKPOINT = "tag_activation_checkpoint"
_REGION = "invoke_subgraph"
_checkpoint_numbers = count(1 << 40)  # apart from those that torch gives to checkpoints


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
        inputs += [self._insert_attribute(name) for name in attributes]
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
        position: int | None,
        held_tensors: Sequence[torch.Tensor],
    ) -> None:
        """Replace bodies of a higher-order op by name, and append tensors to the operands at a position.

        position: of a tuple of operands; None if the last arguments are the operands.
        """
        twin = self._twins[node]
        args: list[Any] = list(twin.args)
        for name, body in bodies.items():
            new_name = f"amanda_{name}_{node.name}"
            setattr(self._module, new_name, body)
            with self._module.graph.inserting_before(twin):
                body_node = self._module.graph.get_attr(new_name)
            args = [body_node if getattr(arg, "target", None) == name else arg for arg in args]
        held_nodes = [self._node_of_held_tensor(tensor) for tensor in held_tensors]
        if position is None:
            args += held_nodes
        else:
            args[position] = (*args[position], *held_nodes)
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
            self._held_nodes[id(tensor)] = self._insert_attribute(name)
        return self._held_nodes[id(tensor)]

    def _insert_attribute(self, name: str) -> Node:
        """Insert a node of an attribute of the module before all calls."""
        # Several calls may hold the same tensor.
        with self._module.graph.inserting_before(self._token or self._first):
            return self._module.graph.get_attr(name)


def inline_bodies(module: GraphModule) -> GraphModule | None:
    """Return a copy of a graph with the bodies of checkpoints and of compile regions in it.

    The nodes of a checkpoint's body are marked for recomputation, as torch marks what it traces of a
    checkpoint.  None if the graph has no such body.
    """
    if not any(_inlinable_body(node, module) is not None for node in module.graph.nodes):
        return None
    target = GraphModule(module, Graph(), type(module).__name__)
    target.graph._codegen = module.graph._codegen
    for name, value in vars(module).items():
        target.__dict__.setdefault(name, value)  # what dynamo leaves on the module
    twins: dict[Node, Any] = {}
    output = _copy_nodes(module, target, twins, prefix="", checkpoint=None)
    target.graph.output(output).meta = copy(_output_of(module).meta)
    for node in list(target.graph.nodes):
        if node.op == "get_attr" and not node.users:  # a body
            target.graph.erase_node(node)
    target.graph.lint()
    target.recompile()
    return target


def _copy_nodes(
    module: GraphModule, target: GraphModule, twins: dict[Node, Any], prefix: str, checkpoint: int | None
) -> Any:
    """Copy the nodes of a module's graph, and of the bodies in it; return what the graph returns.

    twins: the copy of each node, which is filled here; of a call of a body, what the body returns.
    prefix: of names of the module's attributes in the target.  checkpoint: number of the checkpoint around
    the nodes.
    """
    for node in module.graph.nodes:
        if node.op == "output" or node in twins:
            continue
        body = _inlinable_body(node, module)
        if body is not None:
            twins[node] = _copy_body(node, body, target, twins, prefix, checkpoint)
            continue
        element = _element_of_body_result(node, twins)
        if element is not None:
            twins[node] = element
            continue
        twin = twins[node] = target.graph.node_copy(node, twins.__getitem__)
        if hasattr(node, "_dynamo_source"):
            twin._dynamo_source = node._dynamo_source
        if node.op in ("get_attr", "call_module") and prefix:
            twin.target = f"{prefix}{node.target}".replace(".", "_")
            setattr(target, twin.target, _attribute_value(module, str(node.target)))
        if checkpoint is not None:
            twin.meta["recompute"], twin.meta["ac_graph_id"] = CheckpointPolicy.PREFER_RECOMPUTE, checkpoint
    return torch.fx.node.map_arg(_output_of(module).args[0], twins.__getitem__)


def _copy_body(
    node: Node,
    body: GraphModule,
    target: GraphModule,
    twins: dict[Node, Any],
    prefix: str,
    checkpoint: int | None,
) -> Any:
    """Copy the nodes of a body to the place of its call; return what the body returns."""
    placeholders = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
    operands = torch.fx.node.map_arg(tuple(_operands(node)), twins.__getitem__)
    inner_twins: dict[Node, Any] = dict(zip(placeholders, operands, strict=True))
    if str(node.target) == _CHECKPOINT:
        checkpoint = next(_checkpoint_numbers)
    return _copy_nodes(body, target, inner_twins, prefix=f"{prefix}{node.name}_", checkpoint=checkpoint)


def _inlinable_body(node: Node, module: GraphModule) -> GraphModule | None:
    """Return the body of a checkpoint or of a region that can be put in its place; None for other nodes."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return None
    if str(node.target) not in (_CHECKPOINT, _REGION):
        return None
    if any(user.target is not getitem for user in node.users):
        return None  # something reads the returned tuple as a whole, which no node of the copy has
    body_node = node.args[0]
    if not isinstance(body_node, torch.fx.Node):
        return None
    body = getattr(module, str(body_node.target), None)
    if not isinstance(body, GraphModule) or "_checkpoint_context_fn" in body.meta:
        return None  # a policy of the user's decides by op what a selective checkpoint keeps
    placeholders = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
    return body if len(placeholders) == len(_operands(node)) else None


def _operands(node: Node) -> Any:
    """Return the operands of a checkpoint or of a region: all after the body and a region's name."""
    return node.args[2:] if str(node.target) == _REGION else node.args[1:]


def _element_of_body_result(node: Node, twins: dict[Node, Any]) -> Any:
    """Return the value that a node takes out of what a body returns; None for other nodes."""
    if node.target is not getitem:
        return None
    arguments: Any = node.args
    container, index = arguments
    returned = twins.get(container)
    return returned[index] if isinstance(returned, (tuple, list)) else None


def _output_of(module: GraphModule) -> Node:
    output: Node = next(iter(reversed(module.graph.nodes)))
    return output


def _attribute_value(module: GraphModule, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value
