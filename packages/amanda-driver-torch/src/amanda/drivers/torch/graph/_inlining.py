"""Bodies of higher-order ops that run where they are called, put in the place of the call."""

from __future__ import annotations

from copy import copy
from itertools import count
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import CheckpointPolicy

if TYPE_CHECKING:
    from torch.fx import Node

_CHECKPOINT = "tag_activation_checkpoint"
_REGION = "invoke_subgraph"
_checkpoint_numbers = count(1 << 40)  # apart from those that torch gives to checkpoints


def inline_bodies(module: GraphModule) -> GraphModule | None:
    """Return a copy of a graph with the bodies of checkpoints and of compile regions in it.

    The nodes of a checkpoint's body are marked for recomputation, as torch marks what it traces of a
    checkpoint.  None if the graph has no such body.
    """
    if not any(_body_of(node, module) is not None for node in module.graph.nodes):
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

    prefix: of names of the module's attributes in the target.  checkpoint: number of the checkpoint around
    the nodes.
    """
    for node in module.graph.nodes:
        if node.op == "output" or node in twins:
            continue
        body = _body_of(node, module)
        if body is not None:
            twins[node] = _copy_body(node, body, target, twins, prefix, checkpoint)
            continue
        source = _returned_element(node, twins)
        if source is not None:
            twins[node] = source
            continue
        twin = twins[node] = target.graph.node_copy(node, twins.__getitem__)
        if hasattr(node, "_dynamo_source"):
            twin._dynamo_source = node._dynamo_source
        if node.op in ("get_attr", "call_module") and prefix:
            twin.target = f"{prefix}{node.target}".replace(".", "_")
            setattr(target, twin.target, _attribute(module, str(node.target)))
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
    places = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
    operands = torch.fx.node.map_arg(tuple(_operands(node)), twins.__getitem__)
    inner_twins: dict[Node, Any] = dict(zip(places, operands, strict=True))
    if str(node.target) == _CHECKPOINT:
        checkpoint = next(_checkpoint_numbers)
    return _copy_nodes(body, target, inner_twins, prefix=f"{prefix}{node.name}_", checkpoint=checkpoint)


def _body_of(node: Node, module: GraphModule) -> GraphModule | None:
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
    places = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
    return body if len(places) == len(_operands(node)) else None


def _operands(node: Node) -> Any:
    """Return the operands of a checkpoint or of a region: all after the body and a region's name."""
    return node.args[2:] if str(node.target) == _REGION else node.args[1:]


def _returned_element(node: Node, twins: dict[Node, Any]) -> Any:
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


def _attribute(module: GraphModule, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value
