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
    """Analyse the operations that a request runs, and edit copies of their nodes.

    Reports gradients whose forward operations are inferred from names.
    """
    session, request = run
    rewriting = SessionRewriting(analysis=analysis, namespace=namespace)
    ops = executed_ops(session.graph, request)
    body, forward = _run_body(session, ops, request, rewriting)
    rewriting.frames = body.frames
    # The rewrite edits the nodes in place.
    rewriting.vanilla_nodes = {name: _copy_node(node) for name, node in body.nodes.items()}
    rewriting.rewritten = rewrite(body, rewriting)
    rewriting.has_insertions = rewriting.rewritten.is_changed
    if forward.guessed:
        rewriting.report(
            "gradients of an imported graph",
            "their forward ops are told by names: TensorFlow's own record is not in a GraphDef",
        )
    return rewriting


def add_copy(run: SessionRun, rewriting: SessionRewriting) -> Route:
    """Put the copy beside the user's nodes; return the route from the user's tensors to the copy's.

    Reports random ops that start anew.  Raises CannotInstrument where TensorFlow refuses the copy.
    """
    session, request = run
    rewritten, graph = rewriting.rewritten, session.graph
    # The number of the execution is fed, and selects the routines. So one copy serves all executions, also at
    # the same time.
    number_node = placeholder(NUMBER, types_pb2.DT_INT64, tf.TensorShape([]))
    nodes = [*rewritten.nodes, number_node, *rewriting.frames.carriers(rewritten)]
    parts = partition(rewriting.vanilla_nodes, nodes)
    copied_nodes = _draw_from_originals(graph, parts, rewriting, rewriting.frames)
    # A fed tensor has no node to read from, so the copy gets its own placeholder for the value.
    fed_placeholders = _FedPlaceholders(graph, request.feeds)
    fed_placeholders.redirect(copied_nodes)
    copied_nodes += fed_placeholders.placeholders
    copied_names = {node.name for node in copied_nodes}
    copied_by_fetch = _copied_endpoints(request, rewritten.outputs, copied_names)
    copied_by_target = {}
    for target in request.targets:
        running_name = rewritten.replacement_by_name.get(target, target)
        if running_name in copied_names:
            copied_by_target[target] = running_name
    inserted_names = [name for names in rewritten.inserted_names_by_op.values() for name in names]
    routine_targets = list(dict.fromkeys(inserted_names))
    # An import returns C operations for those names only that were asked for.
    result_names = {
        NUMBER,
        *routine_targets,
        *copied_by_target.values(),
        *fed_placeholders.name_by_fed.values(),
        *(name for name, _ in copied_by_fetch.values()),
    }
    hidden_nodes = HiddenNodes.of_graph(graph)
    try:
        hidden = hidden_nodes.add(session, copied_nodes, rewriting.library, sorted(result_names))
    except errors_impl.OpError as error:
        raise CannotInstrument(
            "a run of a session", f"TensorFlow refuses the copy: {error.message}"
        ) from error
    return Route(
        hidden, copied_by_fetch, copied_by_target, fed_placeholders.name_by_fed, routine_targets, NUMBER
    )


def _copied_endpoints(
    request: RunRequest, output_refs: Sequence[str], copied_names: Collection[str]
) -> dict[Endpoint, Endpoint]:
    """Return the copy's tensor by fetched tensor, without those that are fed or computed by the user's nodes.

    output_refs: of the tensors that are fetched and not fed.  copied_names: of the copied nodes.
    """
    copied_by_fetch: dict[Endpoint, Endpoint] = {}
    computed_fetches = [fetch for fetch in request.fetches if fetch not in request.feeds]
    for fetch, output_ref in zip(computed_fetches, output_refs, strict=True):
        edge = GraphSyntax().parse(output_ref)
        if edge.node in copied_names:
            copied_by_fetch[fetch] = (edge.node, edge.index)
    return copied_by_fetch


def _run_body(
    session: Any, ops: Sequence[Any], request: RunRequest, rewriting: TensorFlowRewriting
) -> tuple[Body, ForwardOps]:
    """Return the operations of a run as a body, and the forward operations of its gradients."""
    graph = session.graph
    forward = ForwardOps(ops)
    ops = sort_forward_first(ops, request, forward.by_gradient)
    frames, stacks = Frames(ops, NUMBER), Stacks(ops, forward.by_gradient)
    # A body is cached with the graph as its weak key, so it must not hold the graph.
    graph_reference = ref(graph)
    body = Body(
        ops,
        nodes={op.name: op.node_def for op in ops},
        syntax=GraphSyntax(),
        number_ref=NUMBER,
        identity=digest("tensorflow/graph", interceptor.ordinal(graph)),
        forward_of=lambda op: forward.by_gradient.get(op.name),
        outputs=[Edge(*fetch) for fetch in request.fetches if fetch not in request.feeds],
        read_value=SessionValueReader(session),
        variable_of=variable_of,
        find_function=lambda name: function_named(name, graph_reference()),
        has_guessed_forwards=forward.guessed,
        gradient_order_of=lambda op: 2 if op.name in forward.second_order else 1,
        frames=frames,
        location_of=Locations(rewriting.layer_index, graph, variable_of),
        find_captured=stacks.captured,
        stacked_names=stacks.forward_names_read,
    )
    return body, forward


def _draw_from_originals(
    graph: Any, parts: Partition, rewriting: TensorFlowRewriting, frames: Frames
) -> list[Any]:
    """Return the copied nodes; random ops draw from their originals, or are reported as starting anew."""
    draw_node_by_name = {}
    restarted_names = [f"{name} of a function" for name in ops_with_generators(rewriting.library)]
    for node in parts.restarted:
        op = graph.get_operation_by_name(node.name)
        # In a loop or branch the original op could not run on fed values.
        is_outside_control_flow = frames.group(op, ()) == OUTSIDE
        if can_run_alone(op) and is_outside_control_flow:
            slot = rewriting.add_slot(OriginalDraw(node.name))
            draw_node_by_name[node.name] = draw_node(node, op, slot, NUMBER)
        else:
            restarted_names.append(f"{node.name} ({node.op})")
    for name in restarted_names:
        rewriting.report_restarted(name)
    return [draw_node_by_name.get(node.name, node) for node in parts.copied]


class _FedPlaceholders:
    """Placeholders in the copy for the tensors that are fed.

    name_by_fed: names of the placeholders by the fed tensor.
    """

    def __init__(self, graph: Any, feeds: frozenset[Endpoint]) -> None:
        self._graph = graph
        self._feeds = feeds
        self.name_by_fed: dict[Endpoint, str] = {}
        self.placeholders: list[Any] = []

    def redirect(self, nodes: Sequence[Any]) -> None:
        """Make nodes read placeholders instead of fed tensors."""
        if not self._feeds:
            return
        for node in nodes:
            for position, text in enumerate(node.input):
                edge = GraphSyntax().parse(text)
                if not text.startswith("^") and (edge.node, edge.index) in self._feeds:
                    node.input[position] = self._placeholder_name((edge.node, edge.index))

    def _placeholder_name(self, fed: Endpoint) -> str:
        """Return the name of the placeholder for a fed tensor, which is added at its first use."""
        if fed not in self.name_by_fed:
            name, index = fed
            tensor = self._graph.get_operation_by_name(name).outputs[index]
            dtype = tensor.dtype.base_dtype.as_datatype_enum
            self.name_by_fed[fed] = f"amanda/fed/{name}/{index}"
            self.placeholders.append(placeholder(self.name_by_fed[fed], dtype, tensor.shape))
        return self.name_by_fed[fed]


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
    prefix: of the names of hidden nodes.  number_name, feed_names: names of these placeholders without it.
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
        self._hidden_fetches = {fetch: hidden.output(*name) for fetch, name in endpoints.items()}
        self._hidden_targets = {target: hidden.operations[name] for target, name in targets.items()}
        self.feed_names = dict(feeds)
        self._hidden_feeds = {
            vanilla: hidden.output(hidden_name, 0) for vanilla, hidden_name in feeds.items()
        }
        self._routine_targets = [hidden.operations[name] for name in routine_targets]
        self.number = None if number is None else hidden.output(number, 0)

    def fetches(self, fetches: Sequence[Any]) -> list[Any]:
        """Return the outputs that are fetched instead of these; the user's where they are not copied."""
        return [self._hidden_fetches.get(endpoint_of(output), output) for output in fetches]

    def targets(self, targets: Sequence[Any]) -> list[Any]:
        """Return the operations that run instead of these targets of a run, and those with routines."""
        return [
            *(self._hidden_targets.get(c_api.TF_OperationName(target), target) for target in targets),
            *self._routine_targets,
        ]

    def feeds(self, feeds: Mapping[Any, Any], number: int | None) -> dict[Any, Any]:
        """Return values for the copy's placeholders, and for the user's, which uncopied nodes may read.

        number: the execution's, which is fed, too; None where an earlier part of the run has fed it.
        """
        values = dict(feeds)
        for output, value in feeds.items():
            hidden_placeholder = self._hidden_feeds.get(endpoint_of(output))
            if hidden_placeholder is not None:
                values[hidden_placeholder] = value
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
        """Return the names of the operations that run instead of these targets, or with routines."""
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
        """Return the present value of a symbol, or the symbol if its value is out of reach.

        Runs the session for the value.
        """
        session = self._session()
        if session is None or not _is_state(tensor.op):
            return tensor
        if tensor.dtype == tf.resource:
            # A handle has no value; a read of the variable that the graph has gives the variable's.
            tensor = _first_read_of(tensor)
        if tensor is None or tensor.dtype == tf.resource:
            return tensor
        return tf.convert_to_tensor(session.run(tensor), tensor.dtype.base_dtype)


def _is_state(op: Any) -> bool:
    """Return True if an operation's value depends on constants and variables alone."""
    if op.type in _VALUE_FORWARDING:
        return all(_is_state(tensor.op) for tensor in op.inputs)
    return op.type in _SOURCES


def _first_read_of(handle: Any) -> Any:
    """Return the result of an op of the graph that reads the variable of a handle; None if there is none."""
    for op in handle.consumers():
        if op.type == "ReadVariableOp":
            return op.outputs[0]
    return None
