"""Instrumented copies of the operations that a session runs, put beside the user's nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import tensorflow as tf
from amanda import interceptor
from amanda.backend import CannotInstrument, GraphAnalysis, Namespace, digest
from tensorflow.core.framework import node_def_pb2, types_pb2
from tensorflow.python.framework import errors_impl

from ..graph import (
    Body,
    Edge,
    GraphSyntax,
    Locations,
    Rewriting,
    RewrittenBody,
    function_named,
    ops_with_generators,
    placeholder,
    rewrite,
    variable_of,
)
from ._execution_order import Endpoint, RunRequest, after_forward, executed_ops
from ._forward_ops import ForwardOps, Stacks
from ._frames import OUTSIDE, Frames
from ._hidden_nodes import HiddenNodes
from ._kernel_state import OriginalDraw, Partition, can_run_alone, draw_node, partition
from ._route import Route
from ._values import SessionValueReader

NUMBER = "amanda/number"


class SessionRun(NamedTuple):
    """A session, and the request that it runs."""

    session: Any
    request: RunRequest


@dataclass(kw_only=True)
class SessionRewriting(Rewriting):
    """The rewrite of the operations that a request runs.

    vanilla_nodes: the nodes as the user's graph has them, by name.  rewritten: the edited nodes.
    frames: the loops and branches of control flow of version 1.
    """

    vanilla_nodes: Mapping[str, Any] = field(init=False)
    rewritten: RewrittenBody = field(init=False)
    frames: Frames = field(init=False)


def rewrite_run(run: SessionRun, analysis: GraphAnalysis, namespace: Namespace) -> SessionRewriting:
    """Analyse the operations that a request runs, and edit copies of their nodes."""
    session, request = run
    rewriting = SessionRewriting(analysis=analysis, namespace=namespace)
    ops = executed_ops(session.graph, request)
    body, forward = _run_body(session, ops, request, rewriting)
    rewriting.frames = body.frames
    # The rewrite edits the nodes in place.
    rewriting.vanilla_nodes = {name: _copy_node(node) for name, node in body.nodes.items()}
    rewriting.rewritten = rewrite(body, rewriting)
    rewriting.changed = rewriting.rewritten.changed
    if forward.guessed:
        rewriting.report(
            "gradients of an imported graph",
            "their forward ops are told by names: TensorFlow's own record is not in a GraphDef",
        )
    return rewriting


def add_copy(run: SessionRun, rewriting: SessionRewriting) -> Route:
    """Put the copy beside the user's nodes; return the route from the user's tensors to the copy's.

    Raises CannotInstrument where TensorFlow refuses the copy.
    """
    session, request = run
    rewritten, graph = rewriting.rewritten, session.graph
    number = placeholder(NUMBER, types_pb2.DT_INT64, tf.TensorShape([]))
    nodes = [*rewritten.nodes, number, *rewriting.frames.carriers(rewritten)]
    copied = _keep_generators(graph, partition(rewriting.vanilla_nodes, nodes), rewriting, rewriting.frames)
    feeds = _FedPlaceholders(graph, request.feeds)
    # A fed tensor has no node to read from, so the copy gets its own placeholder for the value.
    copied = [*feeds.redirect(copied), *feeds.placeholders]
    names = {node.name for node in copied}
    endpoints: dict[Endpoint, Endpoint] = {}
    fetched = [fetch for fetch in request.fetches if fetch not in request.feeds]
    for fetch, text in zip(fetched, rewritten.outputs, strict=True):
        edge = GraphSyntax().parse(text)
        if edge.node in names:
            endpoints[fetch] = (edge.node, edge.index)
    targets = {name: node for name in request.targets if (node := rewritten.removed.get(name, name)) in names}
    extra = list(dict.fromkeys(name for group in rewritten.inserted.values() for name in group))
    ends = {
        NUMBER,
        *extra,
        *targets.values(),
        *feeds.names.values(),
        *(name for name, _ in endpoints.values()),
    }
    try:
        hidden = HiddenNodes.of_graph(graph).add(session, copied, rewriting.library, sorted(ends))
    except errors_impl.OpError as error:
        raise CannotInstrument(
            "a run of a session", f"TensorFlow refuses the copy: {error.message}"
        ) from error
    return Route(hidden, endpoints, targets, feeds.names, extra, NUMBER)


def _run_body(
    session: Any, ops: Sequence[Any], request: RunRequest, rewriting: Rewriting
) -> tuple[Body, ForwardOps]:
    """Return the operations of a run as a body, and the forward operations of its gradients."""
    graph = session.graph
    forward = ForwardOps(ops)
    ops = after_forward(ops, request, forward.by_gradient)
    frames, stacks = Frames(ops, NUMBER), Stacks(ops, forward.by_gradient)
    # A body is cached with the graph as its weak key, so it must not hold the graph.
    reference = ref(graph)
    body = Body(
        ops,
        {op.name: op.node_def for op in ops},
        GraphSyntax(),
        NUMBER,
        digest("tensorflow/graph", interceptor.ordinal(graph)),
        forward_of=lambda op: forward.by_gradient.get(op.name),
        outputs=[Edge(*fetch) for fetch in request.fetches if fetch not in request.feeds],
        read_value=SessionValueReader(session),
        variable_of=variable_of,
        functions=lambda name: function_named(name, reference()),
        guessed=forward.guessed,
        order_of=lambda op: 2 if op.name in forward.second_order else 1,
        frames=frames,
        place_of=Locations(rewriting.layers, graph, variable_of),
        captured=stacks.captured,
        stacked=stacks.read,
    )
    return body, forward


def _keep_generators(graph: Any, parts: Partition, rewriting: Rewriting, frames: Frames) -> list[Any]:
    """Return the copied nodes; a random op of the copy draws from the original op, or the report names it."""
    stand_ins = {}
    restarted = [f"{name} of a function" for name in ops_with_generators(rewriting.library)]
    for node in parts.restarted:
        op = graph.get_operation_by_name(node.name)
        # In a loop or branch the original op could not run on fed values.
        if can_run_alone(op) and frames.group(op, ()) == OUTSIDE:
            slot = rewriting.add(OriginalDraw(node.name))
            stand_ins[node.name] = draw_node(node, op, slot, NUMBER)
        else:
            restarted.append(f"{node.name} ({node.op})")
    for name in restarted:
        rewriting.report(f"the state of {name}", "its kernel holds it, and a copy's begins anew")
    return [stand_ins.get(node.name, node) for node in parts.copied]


class _FedPlaceholders:
    """Placeholders in the copy for the tensors that are fed.

    names: of the placeholders, by the fed tensor.
    """

    def __init__(self, graph: Any, feeds: frozenset[Endpoint]) -> None:
        self._graph = graph
        self._feeds = feeds
        self.names: dict[Endpoint, str] = {}
        self.placeholders: list[Any] = []

    def redirect(self, nodes: Sequence[Any]) -> list[Any]:
        """Make nodes read placeholders instead of fed tensors; return the nodes."""
        if self._feeds:
            for node in nodes:
                for position, read in enumerate(node.input):
                    edge = GraphSyntax().parse(read)
                    if not read.startswith("^") and (edge.node, edge.index) in self._feeds:
                        node.input[position] = self._name((edge.node, edge.index))
        return list(nodes)

    def _name(self, fed: Endpoint) -> str:
        """Return the name of the placeholder for a fed tensor, which is added at its first use."""
        if fed not in self.names:
            name, index = fed
            tensor = self._graph.get_operation_by_name(name).outputs[index]
            kind = tensor.dtype.base_dtype.as_datatype_enum
            self.names[fed] = f"amanda/fed/{name}/{index}"
            self.placeholders.append(placeholder(self.names[fed], kind, tensor.shape))
        return self.names[fed]


def _copy_node(node: Any) -> Any:
    copy = node_def_pb2.NodeDef()
    copy.CopyFrom(node)
    return copy
