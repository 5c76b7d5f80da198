"""Instrumented copies of what sessions run: one for each request, layer of tools, and graph."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any
from weakref import ref

from amanda import interceptor
from amanda.backend import Execution, GuardedCopies, Namespace, State, bind_to_subjects, digest
from tensorflow.core.framework import node_def_pb2, types_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import errors_impl

from ..graph import (
    Body,
    Edge,
    GraphSyntax,
    GraphTensors,
    Places,
    Rewriting,
    Rewritten,
    TensorFlowReads,
    draws,
    function_named,
    rewrite,
    variable_of,
)
from ._cone import Endpoint, Request, after_forward, cone
from ._draws import Draw, SessionExecution, can_draw, drawing
from ._frames import Frames
from ._gradients import ForwardOps
from ._hidden import HiddenNodes
from ._partition import Partition, partition
from ._run import Route
from ._stacks import Stacks
from ._values import Reading

NUMBER = "amanda/number"


class Copy:
    """What runs for one request: its route, and the routines that are called back.

    route: None where nothing is inserted.
    """

    def __init__(self, route: Route | None, table: Mapping[int, Any], reports: Sequence[Any]) -> None:
        self.route = route
        self.table = table
        self.reports = tuple(reports)


class Copies:
    """Makes copies of what is run, and keeps them with the layer that they are for."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._lock = threading.RLock()

    def prepare(self, session: Any, request: Request, state: State) -> tuple[Route, Execution] | None:
        """The copy that stands for a run, and the execution that it calls back to."""
        assert state.layer is not None
        if session._target:
            state.report("a session of a server", "routines cannot be called in its process")
            return None
        graph = session.graph
        copies = state.layer.rewrites.setdefault(graph, {}) if state.cache else {}
        key = request, state.autodiff
        kept = copies.get(key)
        copy = None if kept is None else kept.find()
        if copy is None:
            with self._lock:
                kept = copies.setdefault(key, GuardedCopies(TensorFlowReads))
                copy = kept.find() or self._made(session, request, state, kept)
        for what, reason in copy.reports:
            state.report(what, reason)
        if copy.route is None:
            return None
        execution = SessionExecution(state, GraphTensors(), copy.table)
        execution.session = ref(session)
        return copy.route, execution

    def _made(self, session: Any, request: Request, state: State, kept: GuardedCopies[Copy]) -> Copy:
        graph = session.graph
        rewriting = Rewriting(state, self._namespace, history=kept.history)
        with interceptor.Suspension(), context.eager_mode():
            ops = cone(graph, request)
            try:
                body, forward, frames = _body(session, ops, request, rewriting)
                own = {name: _copied(node) for name, node in body.nodes.items()}
                rewritten = rewrite(body, rewriting)
            except BaseException:
                rewriting.analysis.forget()
                raise
            rewriting.analysis.finish()
            for op_id in chain.from_iterable(rewriting.ids.values()):
                bind_to_subjects(op_id, [graph])
            if forward.by_name:
                rewriting.report(
                    "gradients of an imported graph",
                    "their forward ops are told by names: TensorFlow's own record is not in a GraphDef",
                )
            try:
                route = self._placed(session, request, own, rewritten, rewriting, frames)
            except errors_impl.OpError as error:
                rewriting.report("a run of a session", f"TensorFlow refuses the copy: {error.message}")
                route = None
        rewriting.tell_unfollowed()
        copy = Copy(route, rewriting.table, rewriting.reports)
        kept.add(copy, rewriting.reads)
        return copy

    def _placed(
        self,
        session: Any,
        request: Request,
        own: Mapping[str, Any],
        rewritten: Rewritten,
        rewriting: Rewriting,
        frames: Frames,
    ) -> Route | None:
        """Put the copy beside the user's nodes, where it differs."""
        if not rewritten.changed:
            return None
        graph = session.graph
        number = node_def_pb2.NodeDef(name=NUMBER, op="Placeholder")
        number.attr["dtype"].type = types_pb2.DT_INT64
        number.attr["shape"].shape.SetInParent()
        nodes = [*rewritten.nodes, number, *frames.carriers(rewritten)]
        copied = _with_draws(graph, partition(own, nodes), rewriting, frames)
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
        hidden = HiddenNodes.of(graph).put(
            session, copied, rewriting.library,
            sorted({NUMBER, *also, *targets.values(), *feeds.names.values(),
                    *(name for name, _ in endpoints.values())}),
        )  # fmt: skip
        return Route(hidden, endpoints, targets, feeds.names, also, NUMBER)


def _body(
    session: Any, ops: Sequence[Any], request: Request, rewriting: Rewriting
) -> tuple[Body, ForwardOps, Frames]:
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
        number_at=frames.number_at,
        alone=frames.alone,
        guessed=forward.by_name,
        order_of=lambda op: 2 if op.name in forward.second else 1,
        depth_at=frames.depth_at,
        end_of=frames.end_of,
        place_of=Places(rewriting.layers, graph, variable_of),
        captured=stacks.captured,
        stacked=stacks.read,
    )
    return body, forward, frames


def _with_draws(graph: Any, parted: Partition, rewriting: Rewriting, frames: Frames) -> list[Any]:
    """The copied nodes; those whose kernels hold generators run the originals, or it is said."""
    stand_ins = {}
    torn = [f"{name} of a function" for name in draws(rewriting.library)]
    for node in parted.torn:
        op = graph.get_operation_by_name(node.name)
        if can_draw(op) and not frames.alone(op):
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
            node = node_def_pb2.NodeDef(name=f"amanda/fed/{name}/{index}", op="Placeholder")
            node.attr["dtype"].type = tensor.dtype.base_dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())
            self.placeholders.append(node)
            self.names[fed] = node.name
        return self.names[fed]


def _copied(node: Any) -> Any:
    copy = node_def_pb2.NodeDef()
    copy.CopyFrom(node)
    return copy
