"""Instrumented copies of the operations that a session runs, and the routes of runs to these copies."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

import tensorflow as tf
from amanda import interceptor
from amanda.backend import CannotInstrument, GraphAnalysis, Namespace, digest
from tensorflow.core.framework import node_def_pb2, types_pb2
from tensorflow.python.client import pywrap_tf_session as c_api
from tensorflow.python.framework import errors_impl

from ..graph import (
    Body,
    Edge,
    GraphSyntax,
    Locations,
    RewrittenBody,
    TensorFlowRewriting,
    function_named,
    ops_with_generators,
    placeholder,
    rewrite,
    variable_of,
)
from ._frames import OUTSIDE, Frames
from ._hidden_nodes import HiddenImport, HiddenNodes
from ._kernel_state import OriginalDraw, Partition, can_run_alone, draw_node, partition
from ._operations import Endpoint, ForwardOps, RunRequest, Stacks, executed_ops, sort_forward_first

NUMBER = "amanda/number"


class SessionRun(NamedTuple):
    """A session, and the request that it runs."""

    session: Any
    request: RunRequest


@dataclass(kw_only=True)
class SessionRewriting(TensorFlowRewriting):
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
    rewriting.has_insertions = rewriting.rewritten.changed
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
    # The number of the execution is fed, and selects the routines. So one copy serves all executions, also at
    # the same time.
    number = placeholder(NUMBER, types_pb2.DT_INT64, tf.TensorShape([]))
    nodes = [*rewritten.nodes, number, *rewriting.frames.carriers(rewritten)]
    parts = partition(rewriting.vanilla_nodes, nodes)
    copied = _draw_from_originals(graph, parts, rewriting, rewriting.frames)
    feeds = _FedPlaceholders(graph, request.feeds)
    # A fed tensor has no node to read from, so the copy gets its own placeholder for the value.
    feeds.redirect(copied)
    copied += feeds.placeholders
    names = {node.name for node in copied}
    endpoints = _copied_endpoints(request, rewritten.outputs, names)
    running_names = {name: rewritten.removed.get(name, name) for name in request.targets}
    targets = {name: running_name for name, running_name in running_names.items() if running_name in names}
    routine_targets = list(dict.fromkeys(name for group in rewritten.inserted.values() for name in group))
    # An import returns C operations for those names only that were asked for.
    result_names = {
        NUMBER,
        *routine_targets,
        *targets.values(),
        *feeds.names.values(),
        *(name for name, _ in endpoints.values()),
    }
    try:
        hidden = HiddenNodes.of_graph(graph).add(session, copied, rewriting.library, sorted(result_names))
    except errors_impl.OpError as error:
        raise CannotInstrument(
            "a run of a session", f"TensorFlow refuses the copy: {error.message}"
        ) from error
    return Route(hidden, endpoints, targets, feeds.names, routine_targets, NUMBER)


def _copied_endpoints(
    request: RunRequest, outputs: Sequence[str], names: Collection[str]
) -> dict[Endpoint, Endpoint]:
    """Return the copy's tensor for each fetched tensor; a node that stays the user's is fetched itself.

    outputs: the copy's spelling of the tensors that are fetched and not fed.  names: of the copied nodes.
    """
    endpoints: dict[Endpoint, Endpoint] = {}
    fetched = [fetch for fetch in request.fetches if fetch not in request.feeds]
    for fetch, text in zip(fetched, outputs, strict=True):
        edge = GraphSyntax().parse(text)
        if edge.node in names:
            endpoints[fetch] = (edge.node, edge.index)
    return endpoints


def _run_body(
    session: Any, ops: Sequence[Any], request: RunRequest, rewriting: TensorFlowRewriting
) -> tuple[Body, ForwardOps]:
    """Return the operations of a run as a body, and the forward operations of its gradients."""
    graph = session.graph
    forward = ForwardOps(ops)
    ops = sort_forward_first(ops, request, forward.by_gradient)
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


def _draw_from_originals(
    graph: Any, parts: Partition, rewriting: TensorFlowRewriting, frames: Frames
) -> list[Any]:
    """Return the copied nodes; a random op of the copy draws from the original op, or the report names it."""
    stand_ins = {}
    restarted = [f"{name} of a function" for name in ops_with_generators(rewriting.library)]
    for node in parts.restarted:
        op = graph.get_operation_by_name(node.name)
        # In a loop or branch the original op could not run on fed values.
        if can_run_alone(op) and frames.group(op, ()) == OUTSIDE:
            slot = rewriting.add_slot(OriginalDraw(node.name))
            stand_ins[node.name] = draw_node(node, op, slot, NUMBER)
        else:
            restarted.append(f"{node.name} ({node.op})")
    for name in restarted:
        rewriting.report_restarted(name)
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

    def redirect(self, nodes: Sequence[Any]) -> None:
        """Make nodes read placeholders instead of fed tensors."""
        if not self._feeds:
            return
        for node in nodes:
            for position, read in enumerate(node.input):
                edge = GraphSyntax().parse(read)
                if not read.startswith("^") and (edge.node, edge.index) in self._feeds:
                    node.input[position] = self._placeholder_name((edge.node, edge.index))

    def _placeholder_name(self, fed: Endpoint) -> str:
        """Return the name of the placeholder for a fed tensor, which is added at its first use."""
        if fed not in self.names:
            name, index = fed
            tensor = self._graph.get_operation_by_name(name).outputs[index]
            kind = tensor.dtype.base_dtype.as_datatype_enum
            self.names[fed] = f"amanda/fed/{name}/{index}"
            self.placeholders.append(placeholder(self.names[fed], kind, tensor.shape))
        return self.names[fed]


def _copy_node(node: Any) -> Any:
    """Return a copy of a NodeDef, which an edit of the original does not change."""
    copy = node_def_pb2.NodeDef()
    copy.CopyFrom(node)
    return copy


def endpoint_of(output: Any) -> Endpoint:
    """Return the name and index of an output of the C API."""
    return c_api.TF_OperationName(output.oper), output.index


def request_of(feeds: Iterable[Any], fetches: Iterable[Any], targets: Iterable[Any]) -> RunRequest:
    """Return the request of a run from the arguments of the C API."""
    return RunRequest(
        tuple([endpoint_of(output) for output in fetches]),
        tuple([c_api.TF_OperationName(operation) for operation in targets]),
        frozenset([endpoint_of(output) for output in feeds]),
    )


class Route:
    """The hidden nodes that a request fetches, runs and feeds instead of the user's.

    endpoints: by a fetched tensor, the hidden tensor.  targets: by a target, the hidden operation.
    feeds: by a fed tensor, the hidden placeholder.
    routine_targets: names of the hidden operations with routines, which run, too.
    number: the hidden placeholder of the execution's number.
    """

    def __init__(
        self,
        hidden: HiddenImport,
        endpoints: Mapping[Endpoint, Endpoint],
        targets: Mapping[str, str],
        feeds: Mapping[Endpoint, str],
        routine_targets: Sequence[str] = (),
        number: str | None = None,
    ) -> None:
        self.prefix = hidden.prefix
        self._hidden_endpoints = dict(endpoints)
        self._target_names = dict(targets)
        self._routine_names = list(routine_targets)
        self.number_name = number
        self._outputs = {vanilla: hidden.output(*hidden_name) for vanilla, hidden_name in endpoints.items()}
        self._targets = {vanilla: hidden.operations[hidden_name] for vanilla, hidden_name in targets.items()}
        self.feed_names = dict(feeds)
        self._feeds = {vanilla: hidden.output(hidden_name, 0) for vanilla, hidden_name in feeds.items()}
        self._routine_targets = [hidden.operations[name] for name in routine_targets]
        self.number = None if number is None else hidden.output(number, 0)

    def fetches(self, fetches: Sequence[Any]) -> list[Any]:
        """Return the outputs that are fetched instead; the user's where these are not copied."""
        return [self._outputs.get(endpoint_of(output), output) for output in fetches]

    def targets(self, targets: Sequence[Any]) -> list[Any]:
        """Return the operations that run instead, and those with routines."""
        return [
            *(self._targets.get(c_api.TF_OperationName(target), target) for target in targets),
            *self._routine_targets,
        ]

    def feeds(self, feeds: Mapping[Any, Any], number: int | None) -> dict[Any, Any]:
        """Return values for the copy's placeholders, and for the user's, which uncopied nodes may read."""
        values = dict(feeds)
        for output, value in feeds.items():
            placeholder = self._feeds.get(endpoint_of(output))
            if placeholder is not None:
                values[placeholder] = value
        if self.number is not None and number is not None:
            values[self.number] = np.asarray(number, np.int64)
        return values

    def all_feeds(self, feeds: Sequence[Any]) -> list[Any]:
        """Return the outputs that are fed where these are: also the copy's placeholders, and the number."""
        return list(self.feeds(dict.fromkeys(feeds), 0))

    def tensor_name(self, name: str) -> str:
        """Return the name of the tensor that is fetched instead of the tensor of this name."""
        op, _, index = name.partition(":")
        hidden_endpoint = self._hidden_endpoints.get((op, int(index or 0)))
        return name if hidden_endpoint is None else f"{self.prefix}{hidden_endpoint[0]}:{hidden_endpoint[1]}"

    def target_names(self, names: Iterable[str]) -> list[str]:
        """Return the names of the operations that run instead, and of those with routines."""
        hidden_names = [
            self.prefix + self._target_names[name] if name in self._target_names else name for name in names
        ]
        return [*hidden_names, *(self.prefix + name for name in self._routine_names)]


_VALUE_FORWARDING = ("Identity", "ReadVariableOp", "Cast", "Enter", "RefEnter", "Reshape", "Transpose")
_SOURCES = ("Const", "VariableV2", "Variable", "VarHandleOp")


class SessionValueReader:
    """Reads the values of constants and variables in a session; returns other symbols as they are."""

    def __init__(self, session: Any) -> None:
        # Weak, since the body of a cached rewrite holds this reader, and must not keep the session open.
        self._session = ref(session)

    def __call__(self, tensor: Any) -> Any:
        """Return the present value of a symbol, or the symbol if its value is out of reach."""
        session = self._session()
        if session is None or not _is_state(tensor.op):
            return tensor
        if tensor.dtype == tf.resource:
            # A handle has no value; a read of the variable that the graph has gives the variable's.
            tensor = _read_tensor(tensor)
        if tensor is None or tensor.dtype == tf.resource:
            return tensor
        return tf.convert_to_tensor(session.run(tensor), tensor.dtype.base_dtype)


def _is_state(op: Any) -> bool:
    """Return True if an operation's value depends on constants and variables alone."""
    if op.type in _VALUE_FORWARDING:
        return all(_is_state(tensor.op) for tensor in op.inputs)
    return op.type in _SOURCES


def _read_tensor(handle: Any) -> Any:
    """Return a tensor of the graph that reads a variable; None if there is none."""
    for op in handle.consumers():
        if op.type == "ReadVariableOp":
            return op.outputs[0]
    return None
