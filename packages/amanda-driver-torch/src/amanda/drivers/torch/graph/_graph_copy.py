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
    """Copy of an FX graph, in which calls with routines replace nodes, and other bodies those of ops.

    calls_python: whether a routine is called as Python.  The copy then makes a token for each execution.
    """

    def __init__(self, module: GraphModule, program: GraphProgram, calls_python: bool) -> None:
        """Copy the graph, with what dynamo has left on the module and on the nodes."""
        self._copy_by_node: dict[Node, Node] = {}
        self._held_nodes: dict[int, Node] = {}  # of tensors that routines hold, by `id`
        graph = Graph()
        output_and_node: Any = graph.graph_copy(module.graph, self._copy_by_node, return_output_node=True)
        output, output_node = output_and_node  # without its output node, whose metadata is copied below
        graph.output(output).meta = copy(output_node.meta)
        graph._codegen = module.graph._codegen
        self._module = GraphModule(module, graph, type(module).__name__)
        # Backends read what dynamo leaves on the module and on the nodes; graph_copy copies neither.
        for name, value in vars(module).items():
            self._module.__dict__.setdefault(name, value)
        for node, copied_node in self._copy_by_node.items():
            if hasattr(node, "_dynamo_source"):
                copied_node._dynamo_source = node._dynamo_source
        self._first_op = next(node for node in graph.nodes if node.op != "placeholder")
        self._token: Node | None = None
        if calls_python:
            with graph.inserting_before(self._first_op):
                self._token = graph.call_function(custom_ops().begin.default, (program.number,))

    def replace_node(
        self, node: Node, instrumented: InstrumentedCall, attribute_names: Sequence[str] = ()
    ) -> None:
        """Replace a node in the copy by a call on the node's inputs and on attributes of the module."""
        copied_node = self._copy_by_node[node]
        inputs = list(copied_node.all_input_nodes)
        inputs += [self._insert_attribute(name) for name in attribute_names]
        with self._module.graph.inserting_before(copied_node):
            call_node = self._insert_call(instrumented, inputs)
        call_node.meta = copy(copied_node.meta)
        copied_node.replace_all_uses_with(call_node)
        if copied_node is self._first_op:
            self._first_op = call_node  # an erased node cannot mark where to insert others
        self._module.graph.erase_node(copied_node)

    def insert_before_readers(self, node: Node, instrumented: InstrumentedCall) -> None:
        """Insert a call on a node's value, whose result all readers of the node get instead."""
        copied_node = self._copy_by_node[node]
        readers = list(copied_node.users)
        with self._module.graph.inserting_before(
            self._first_op if copied_node.op == "placeholder" else copied_node.next
        ):
            call_node = self._insert_call(instrumented, [copied_node])
        call_node.meta = copy(copied_node.meta)
        for reader in readers:
            reader.replace_input_with(copied_node, call_node)

    def replace_bodies(
        self, node: Node, body_by_name: Mapping[str, GraphModule], operands_position: int | None,
        held_tensors: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        """Replace the bodies of a higher-order op by others, and append tensors to its operands.

        body_by_name: by the old body's attribute name.  operands_position: of the tuple of operands among the
        arguments; None if the last arguments are the operands.
        """
        copied_node = self._copy_by_node[node]
        args: list[Any] = list(copied_node.args)
        for name, body in body_by_name.items():
            new_name = f"amanda_{name}_{node.name}"
            setattr(self._module, new_name, body)
            with self._module.graph.inserting_before(copied_node):
                body_node = self._module.graph.get_attr(new_name)
            args = [body_node if getattr(arg, "target", None) == name else arg for arg in args]
        held_nodes = [self._node_of_held_tensor(tensor) for tensor in held_tensors]
        if operands_position is None:
            args += held_nodes
        else:
            args[operands_position] = (*args[operands_position], *held_nodes)
        copied_node.args = tuple(args)

    def insert_before_output(self, instrumented: InstrumentedCall) -> bool:
        """Insert a call on the first output of the graph; return False if the graph has no output."""
        output_node = _output_of(self._module)
        if not output_node.all_input_nodes:
            return False
        first_output = output_node.all_input_nodes[0]
        with self._module.graph.inserting_before(output_node):
            call_node = self._insert_call(instrumented, [first_output])
        call_node.meta = copy(first_output.meta)
        output_node.replace_input_with(first_output, call_node)
        return True

    def finish(self) -> GraphModule:
        """Return the copy as a module, after a check of its graph."""
        self._module.graph.lint()
        self._module.recompile()
        return self._module

    def _insert_call(self, instrumented: InstrumentedCall, inputs: Sequence[Node]) -> Node:
        """Insert a call on the token, on the tensors that its routines hold, and on inputs."""
        held_nodes = [self._node_of_held_tensor(tensor) for tensor in instrumented.held_tensors.tensors]
        return self._module.graph.call_function(instrumented, (self._token, *held_nodes, *inputs))

    def _node_of_held_tensor(self, tensor: torch.Tensor) -> Node:
        """Return the node of a tensor that routines hold; the first time, make an attribute of the tensor."""
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
        with self._module.graph.inserting_before(self._token or self._first_op):
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
    copy_by_node: dict[Node, Any] = {}
    output = _copy_nodes(module, target, copy_by_node, prefix="", checkpoint=None)
    target.graph.output(output).meta = copy(_output_of(module).meta)
    for node in list(target.graph.nodes):
        if node.op == "get_attr" and not node.users:  # a body
            target.graph.erase_node(node)
    target.graph.lint()
    target.recompile()
    return target


def _copy_nodes(
    module: GraphModule,
    target: GraphModule,
    copy_by_node: dict[Node, Any],
    prefix: str,
    checkpoint: int | None,
) -> Any:
    """Copy the nodes of a module's graph into the target, and bodies in the place of their calls.

    Returns what the graph returns, in nodes of the target.
    copy_by_node: the copy of each node, which is filled here; of a call of a body, what the body returns.
    prefix: of names of the module's attributes in the target.  checkpoint: number of the one around.
    """
    for node in module.graph.nodes:
        if node.op == "output" or node in copy_by_node:
            continue
        body = _inlinable_body(node, module)
        if body is not None:
            copy_by_node[node] = _copy_body(node, body, target, copy_by_node, prefix, checkpoint)
            continue
        element = _element_of_body_result(node, copy_by_node)
        if element is not None:
            copy_by_node[node] = element
            continue
        copied_node = copy_by_node[node] = target.graph.node_copy(node, copy_by_node.__getitem__)
        if hasattr(node, "_dynamo_source"):
            copied_node._dynamo_source = node._dynamo_source
        if node.op in ("get_attr", "call_module") and prefix:
            copied_node.target = f"{prefix}{node.target}".replace(".", "_")
            setattr(target, copied_node.target, _attribute_value(module, str(node.target)))
        if checkpoint is not None:
            copied_node.meta["recompute"], copied_node.meta["ac_graph_id"] = (
                CheckpointPolicy.PREFER_RECOMPUTE,
                checkpoint,
            )
    return torch.fx.node.map_arg(_output_of(module).args[0], copy_by_node.__getitem__)


def _copy_body(
    node: Node, body: GraphModule, target: GraphModule, copy_by_node: dict[Node, Any], prefix: str,
    checkpoint: int | None,
) -> Any:  # fmt: skip
    """Copy the nodes of a body to the place of its call; return what the body returns."""
    placeholders = [body_node for body_node in body.graph.nodes if body_node.op == "placeholder"]
    operands = torch.fx.node.map_arg(tuple(_operands(node)), copy_by_node.__getitem__)
    copy_by_inner_node: dict[Node, Any] = dict(zip(placeholders, operands, strict=True))
    if str(node.target) == _CHECKPOINT:
        checkpoint = next(_checkpoint_numbers)
    return _copy_nodes(
        body, target, copy_by_inner_node, prefix=f"{prefix}{node.name}_", checkpoint=checkpoint
    )


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


def _element_of_body_result(node: Node, copy_by_node: dict[Node, Any]) -> Any:
    """Return what stands for a node that takes an element out of a body's result; None for other nodes."""
    if node.target is not getitem:
        return None
    arguments: Any = node.args
    container, index = arguments
    body_result = copy_by_node.get(container)
    return body_result[index] if isinstance(body_result, (tuple, list)) else None


def _output_of(module: GraphModule) -> Node:
    output_node: Node = next(iter(reversed(module.graph.nodes)))
    return output_node


def _attribute_value(module: GraphModule, target: str) -> Any:
    """Return the attribute of a module that a `get_attr` node names by a dotted path."""
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value
