"""Copies of functions that are registered with the runtime, and facts of forward functions.

A copy in which no operators can be fused runs without TensorFlow's graph optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from amanda.backend import OpFacts
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import atomic_function

from ..graph import Location, TensorFlowRewriting, facts_of, grouped_outputs


class RegisteredCopy:
    """A copy of a function that is registered with the runtime.

    name: the copy's name.  vanilla: the function's name.
    skips_optimizer: True if routines lie between nearly all operators, so that grappler can fuse none.
    """

    def __init__(self, vanilla: str, definitions: Sequence[Any]) -> None:
        """Register the copy, the last of these definitions, and the functions that it calls."""
        self._vanilla = vanilla
        self.skips_optimizer = is_unfusable(definitions)
        self._handles: list[Any] = []
        current = context.context()
        for definition in definitions:
            self.name = definition.signature.name.encode()
            # A name contains a digest of the content, so a function of that name is the same copy.
            if not current.has_function(self.name):
                current.add_function_def(definition)
            # The runtime drops a function with its last AtomicFunction.
            self._handles.append(atomic_function.AtomicFunction(self.name, current, None))

    def rename_in_error(self, error: Any) -> None:
        """Replace the copy's name in an operation's error by the function's."""
        error._message = error._message.replace(self.name.decode(), self._vanilla)


class ForwardFacts:
    """Results of rewriting a forward function that the rewriting of its backward functions needs.

    identity: of the function's graph.  plans: of its operations, by their ids.
    tables: those tables of `TensorFlowRewriting` that are about forward operations.
    locations: by operation, the layers around it for each of its ids; weak in the operations.
    callees: graphs of the functions that an operation calls; weak in the operations and the graphs.
    """

    _TABLES = ("saved_values", "saved_values_by_input", "autodiff_places", "depths")

    def __init__(self, rewriting: TensorFlowRewriting, identity: int) -> None:
        self.identity = identity
        self.plans = rewriting.analysis.plans
        self.tables = {name: getattr(rewriting, name) for name in self._TABLES}
        self.locations: weakref.WeakKeyDictionary[Any, dict[int, Location]] = weakref.WeakKeyDictionary()
        for op, facts_by_id in rewriting.facts_by_id.items():
            self.locations[op] = {
                op_id: Location(facts.scope, facts.aliases) for op_id, facts in facts_by_id.items()
            }
        self.callees: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        for op, graphs in rewriting.callees.items():
            # Graphs die with their functions; a plan must not keep them.
            self.callees[op] = {place: weakref.ref(graph) for place, graph in graphs.items()}

    def copy_into(self, rewriting: TensorFlowRewriting) -> None:
        """Copy the facts of the forward operations into the rewriting of a backward function."""
        rewriting.analysis.plans.update(self.plans)
        for name, table in self.tables.items():
            # Tables of several calls may be merged: op ids differ from call to call.
            getattr(rewriting, name).update(table)
        for op, graphs in self.callees.items():
            rewriting.callees[op] = {place: graph() for place, graph in graphs.items()}
        rewriting.origin = lambda op, op_id: self._origin(rewriting, op, op_id)

    def _origin(
        self, rewriting: TensorFlowRewriting, op: Any, op_id: int | None
    ) -> tuple[int, OpFacts] | None:
        """Return op id and facts of an operation of the forward function; None for others."""
        locations = self.locations.get(op)
        if not locations:
            return None
        if op_id is None or op_id not in locations:
            op_id = next(reversed(locations))
        facts = facts_of(op, op_id, rewriting.namespace, place=locations[op_id])
        facts.outputs = grouped_outputs(op, op.node_def)
        return op_id, facts


_CALLBACK = "EagerPyFunc"
_DEFAULT = rewriter_config_pb2.RewriterConfig()


def is_unfusable(definitions: Sequence[Any]) -> bool:
    """Return True if functions have as many calls of Python as operators, so that none can be fused."""
    types = [node.op for definition in definitions for node in definition.node_def]
    # A call of Python for each operator is half of all nodes.
    return 2 * types.count(_CALLBACK) >= len(types)


def call_unoptimized(call: Callable[..., Any], *args: Any) -> Any:
    """Call the runtime without its graph optimizer, which takes most of the time of a first call."""
    current = context.context()
    earlier_options = current.function_call_options
    # The options are those of a thread, so calls on other threads keep theirs.
    current.function_call_options = _options_without_optimizer(
        earlier_options.config_proto_serialized, earlier_options.executor_type
    )
    try:
        return call(*args)
    finally:
        current.function_call_options = earlier_options


@lru_cache(maxsize=16)
def _options_without_optimizer(serialized: bytes, executor_type: str | None) -> Any:
    """Return these options without the optimizer, unless the user has set options of the optimizer."""
    config = config_pb2.ConfigProto.FromString(serialized)
    options = config.graph_options.rewrite_options
    options.disable_meta_optimizer = options.disable_meta_optimizer or options == _DEFAULT
    return context.FunctionCallOptions(executor_type, config)
