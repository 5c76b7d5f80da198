"""Instrumented copies of what sessions run, put beside the user's nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import tensorflow as tf
from amanda import interceptor
from amanda.backend import GraphAnalysis, Namespace, Uninstrumented, digest
from tensorflow.core.framework import node_def_pb2, types_pb2
from tensorflow.python.framework import errors_impl

from ..graph import (
    Body,
    Edge,
    GraphSyntax,
    Locations,
    Rewriting,
    Rewritten,
    draws,
    function_named,
    placeholder,
    rewrite,
    variable_of,
)
from ._cone import Endpoint, Request, after_forward, cone
from ._draws import Draw, can_draw, drawing
from ._frames import OUTSIDE, Frames
from ._gradients import ForwardOps
from ._hidden import HiddenNodes
from ._partition import Partition, partition
from ._run import Route
from ._stacks import Stacks
from ._values import Reading

NUMBER = "amanda/number"


class Asked(NamedTuple):
    """A request that a session is to run."""

    session: Any
    request: Request


@dataclass(kw_only=True)
class SessionRewriting(Rewriting):
    """One rewrite of what a session runs.

    own: the nodes as the user's graph has them, by name.  rewritten: what came of them.
    """

    own: Mapping[str, Any] = field(init=False)
    rewritten: Rewritten = field(init=False)
    frames: Frames = field(init=False)


def rewritten(asked: Asked, analysis: GraphAnalysis, namespace: Namespace) -> SessionRewriting:
    """The rewrite of the part of a session's graph that a request runs."""
    session, request = asked
    rewriting = SessionRewriting(analysis=analysis, namespace=namespace)
    ops = cone(session.graph, request)
    body, forward = _body(session, ops, request, rewriting)
    rewriting.frames = body.frames
    rewriting.own = {name: _copied(node) for name, node in body.nodes.items()}
    rewriting.rewritten = rewrite(body, rewriting)
    rewriting.changed = rewriting.rewritten.changed
    if forward.by_name:
        rewriting.report(
            "gradients of an imported graph",
            "their forward ops are told by names: TensorFlow's own record is not in a GraphDef",
        )
    return rewriting


def route(asked: Asked, rewriting: SessionRewriting) -> Route:
    """Put the copy beside the user's nodes; the way through it.

    Raises Uninstrumented where TensorFlow refuses it.
    """
    session, request = asked
    rewritten, graph = rewriting.rewritten, session.graph
    number = placeholder(NUMBER, types_pb2.DT_INT64, tf.TensorShape([]))
    nodes = [*rewritten.nodes, number, *rewriting.frames.carriers(rewritten)]
    copied = _with_draws(graph, partition(rewriting.own, nodes), rewriting, rewriting.frames)
    feeds = _Feeds(graph, request.feeds)
    copied = [*feeds.redirected(copied), *feeds.placeholders]
    names = {node.name for node in copied}
    endpoints: dict[Endpoint, Endpoint] = {}
    wanted = [one for one in request.fetches if one not in request.feeds]
    for one, text in zip(wanted, rewritten.outputs, strict=True):
        edge = GraphSyntax().parse(text)
        if edge.node in names:
            endpoints[one] = (edge.node, edge.index)
    targets = {
        name: other for name in request.targets if (other := rewritten.removed.get(name, name)) in names
    }
    also = list(dict.fromkeys(one for group in rewritten.inserted.values() for one in group))
    ends = {
        NUMBER,
        *also,
        *targets.values(),
        *feeds.names.values(),
        *(name for name, _ in endpoints.values()),
    }
    try:
        hidden = HiddenNodes.of(graph).put(session, copied, rewriting.library, sorted(ends))
    except errors_impl.OpError as error:
        raise Uninstrumented("a run of a session", f"TensorFlow refuses the copy: {error.message}") from error
    return Route(hidden, endpoints, targets, feeds.names, also, NUMBER)


def _body(
    session: Any, ops: Sequence[Any], request: Request, rewriting: Rewriting
) -> tuple[Body, ForwardOps]:
    graph = session.graph
    forward = ForwardOps(ops)
    ops = after_forward(ops, request, forward.of)
    frames, stacks = Frames(ops, NUMBER), Stacks(ops, forward.of)
    reference = ref(graph)
    body = Body(
        ops,
        {op.name: op.node_def for op in ops},
        GraphSyntax(),
        NUMBER,
        digest("tensorflow/graph", interceptor.ordinal(graph)),
        forward_of=lambda op: forward.of.get(op.name),
        outputs=[Edge(*one) for one in request.fetches if one not in request.feeds],
        read_value=Reading(session),
        variable_of=variable_of,
        functions=lambda name: function_named(name, reference()),
        guessed=forward.by_name,
        order_of=lambda op: 2 if op.name in forward.second else 1,
        frames=frames,
        place_of=Locations(rewriting.layers, graph, variable_of),
        captured=stacks.captured,
        stacked=stacks.read,
    )
    return body, forward


def _with_draws(graph: Any, parted: Partition, rewriting: Rewriting, frames: Frames) -> list[Any]:
    """The copied nodes; those whose kernels hold generators run the originals, or it is said."""
    stand_ins = {}
    torn = [f"{name} of a function" for name in draws(rewriting.library)]
    for node in parted.torn:
        op = graph.get_operation_by_name(node.name)
        if can_draw(op) and frames.group(op, ()) == OUTSIDE:
            slot = rewriting.add(Draw(node.name))
            stand_ins[node.name] = drawing(node, op, slot, NUMBER)
        else:
            torn.append(f"{node.name} ({node.op})")
    for name in torn:
        rewriting.report(f"the state of {name}", "its kernel holds it, and a copy's begins anew")
    return [stand_ins.get(node.name, node) for node in parted.copied]


class _Feeds:
    """Placeholders in the copy for the tensors that are fed; names: theirs by the tensor."""

    def __init__(self, graph: Any, feeds: frozenset[Endpoint]) -> None:
        self._graph = graph
        self._feeds = feeds
        self.names: dict[Endpoint, str] = {}
        self.placeholders: list[Any] = []

    def redirected(self, nodes: Sequence[Any]) -> list[Any]:
        """The nodes, which read placeholders where they read what is fed."""
        if self._feeds:
            for node in nodes:
                for position, read in enumerate(node.input):
                    edge = GraphSyntax().parse(read)
                    if not read.startswith("^") and (edge.node, edge.index) in self._feeds:
                        node.input[position] = self._name((edge.node, edge.index))
        return list(nodes)

    def _name(self, fed: Endpoint) -> str:
        if fed not in self.names:
            name, index = fed
            tensor = self._graph.get_operation_by_name(name).outputs[index]
            kind = tensor.dtype.base_dtype.as_datatype_enum
            self.names[fed] = f"amanda/fed/{name}/{index}"
            self.placeholders.append(placeholder(self.names[fed], kind, tensor.shape))
        return self.names[fed]


def _copied(node: Any) -> Any:
    copy = node_def_pb2.NodeDef()
    copy.CopyFrom(node)
    return copy
