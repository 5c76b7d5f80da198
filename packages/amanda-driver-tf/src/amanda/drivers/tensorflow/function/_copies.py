"""Instrumented copies of functions, kept as long as the function and the tools live."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda.backend import GraphAnalysis, GuardedCopies, Namespace, State
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import atomic_function

from .._layers import handles_of, kinds_of_layers
from ..graph import (
    Function,
    GraphTensors,
    Location,
    Rewriting,
    TensorFlowReads,
    body_of,
    callees,
    copy_of,
    draws,
    function_of,
    rewrite,
)
from ..graph._facts import facts_of, grouped_outputs
from ._identities import Identities, parts
from ._options import is_torn

if TYPE_CHECKING:
    from ._boundary import Trace


class Copy:
    """An instrumented copy of one function for one layer of tools.

    name: the runtime's name of the copy; None where nothing is inserted.
    torn: whether routines keep nearly all of its operators apart.
    forward: whether a backward function may be called for its calls.
    table: what runs at which slot.  reports: what could not be instrumented.
    identity: of its graph.
    ids: of the forward operations, with the layers that they lie in, as long as their graph lives.
    backward: kept copies of backward functions, which read what calls of this one keep.
    """

    def __init__(self, function: Function, rewriting: Rewriting, identity: int) -> None:
        self.identity = identity
        self.name: bytes | None = None
        self.torn = False
        self.table = rewriting.table
        self.layer = rewriting.analysis.layer
        self.plans = rewriting.analysis.plans
        self.kept = rewriting.kept
        self.shared = rewriting.shared
        self.taped = rewriting.taped
        self.depths = rewriting.depths
        self.reports = list(rewriting.reports)
        self.backward: weakref.WeakKeyDictionary[Any, dict[Any, KeptCopies]] = weakref.WeakKeyDictionary()
        self.ids: weakref.WeakKeyDictionary[Any, dict[int, Location]] = weakref.WeakKeyDictionary()
        for op, known in rewriting.ids.items():
            self.ids[op] = {op_id: Location(facts.scope, facts.aliases) for op_id, facts in known.items()}
        self.callees: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        for op, graphs in rewriting.callees.items():
            self.callees[op] = {place: weakref.ref(graph) for place, graph in graphs.items()}
        self._vanilla = function.name
        self.forward = parts(function.name)[0] == "forward"
        self._handles: list[Any] = []

    def add(self, definitions: Sequence[Any]) -> None:
        """Register the copy, which comes last, and the functions that it calls."""
        current = context.context()
        self.torn = is_torn(definitions)
        for definition in definitions:
            name = definition.signature.name.encode()
            if not current.has_function(name):
                current.add_function_def(definition)
            self._handles.append(atomic_function.AtomicFunction(name, current, None))
            self.name = name

    def in_vanilla_terms(self, error: Any) -> None:
        """Name, in an operation's error, the function that the user knows."""
        if self.name is not None:
            error._message = error._message.replace(self.name.decode(), self._vanilla)


KeptCopies = GuardedCopies[Copy]


class Copies:
    """Makes copies, and finds those made before.

    budget: how many bytes observers may hold that run together.
    """

    def __init__(self, namespace: Namespace, budget: Callable[[], int]) -> None:
        self._namespace = namespace
        self._budget = budget
        self._lock = threading.RLock()
        self._identities = Identities()

    def known(self, state: State, atomic: Any, trace: Trace | None) -> Copy | None:
        """The copy of a function for the tools in force, if it is kept."""
        layer = state.layer if trace is None else trace.layer
        if layer is None or not state.cache:
            return None
        all_kept = layer.rewrites if trace is None else trace.copy.backward
        kept = all_kept.get(atomic, {}).get((state.autodiff, _closed(state, layer, trace)))
        return None if kept is None else kept.find()

    def of(self, state: State, atomic: Any, args: Sequence[Any], trace: Trace | None) -> Copy | None:
        """The copy of a function for the tools in force; None where it is left as it is."""
        layer = state.layer if trace is None else trace.layer
        if layer is None:
            return None
        if trace is None and b"__backward_" in atomic.name:
            if any(one.wants_backward for one in layer.chain):
                name = parts(atomic.name.decode())[1]
                state.report(f"the backward ops of {name}", "its forward pass ran before the scope")
            return None
        closed = _closed(state, layer, trace)
        kept = KeptCopies(TensorFlowReads)
        with self._lock if state.cache else nullcontext():
            if state.cache:  # what a tool's analysis forgets meanwhile stays forgotten
                all_kept = layer.rewrites if trace is None else trace.copy.backward
                kept = all_kept.setdefault(atomic, {}).setdefault((state.autodiff, closed), kept)
            return kept.find() or self._make(state, layer, atomic, args, trace, kept)

    def _make(
        self,
        state: State,
        layer: Any,
        atomic: Any,
        args: Sequence[Any],
        trace: Trace | None,
        kept: KeptCopies,
    ) -> Copy:
        function = function_of(atomic)
        rewriting = Rewriting(
            analysis=GraphAnalysis(state, GraphTensors(), layer), namespace=self._namespace,
            budget=self._budget(), history=kept.history,
        )  # fmt: skip
        rewriting.analysis.closed = _closed(state, layer, trace)
        rewriting.differentiated = parts(function.name)[0] != "inference"
        rewriting.layers.know(_variables(function.graph))
        if trace is not None:
            rewriting.analysis.plans.update(trace.copy.plans)
            rewriting.kept.update(trace.copy.kept)
            rewriting.shared.update(trace.copy.shared)
            rewriting.taped.update(trace.copy.taped)
            rewriting.depths.update(trace.copy.depths)
            for op, graphs in trace.copy.callees.items():
                rewriting.callees[op] = {place: graph() for place, graph in graphs.items()}
            rewriting.origin = lambda op, op_id: self._origin(op, op_id, trace)
        body = body_of(
            function, self._identities.of(function.graph, function.name), args.__getitem__,
            rewriting, parts(function.name)[0] == "forward", backward=trace is not None,
            layers=rewriting.layers, within=_calling(function.graph),
            forward_identity=None if trace is None else trace.copy.identity,
        )  # fmt: skip
        try:
            rewritten = rewrite(body, rewriting)
        except BaseException:
            rewriting.analysis.forget()
            raise
        rewriting.tell_unfollowed()
        copy = Copy(function, rewriting, body.identity)
        compiled = function.definition.attr.get("_XlaMustCompile")
        if rewritten.changed and compiled is not None and compiled.b:
            copy.reports.append(
                (f"jit_compile of {parts(function.name)[1]}", "in a scope it runs without XLA")
            )
        if copy.forward and trace is not None and (trace.copy.kept or trace.copy.taped):
            copy.reports.append(
                (
                    f"second gradients of {parts(function.name)[1]}",
                    "they take what routines gave for constants",
                )
            )
        rewriting.analysis.finish(function.graph)
        if rewritten.changed:
            definitions = [*rewriting.library, copy_of(function.definition, rewritten, body)]
            copy.add(definitions)
            for name in draws(callees(definitions, _definition)):
                copy.reports.append((f"the state of {name}", "its kernel holds it, and a copy's begins anew"))
        kept.add(copy, rewriting.reads)
        return copy

    def _origin(self, op: Any, op_id: int | None, trace: Trace) -> Any:
        known = trace.copy.ids.get(op)
        if not known:
            return None
        if op_id is None or op_id not in known:
            op_id = next(reversed(known))
        place = known[op_id]
        facts = facts_of(op, op_id, self._namespace, None, place=place)
        facts.outputs = grouped_outputs(op)
        return op_id, facts


def _closed(state: State, layer: Any, trace: Trace | None) -> bool:
    """Return True if the tools of a forward call are applied no more."""
    return trace is not None and not any(state.is_open(tool) for tool in layer.applied)


def _calling(graph: Any) -> Sequence[Any]:
    """The layers that call a function, if they hold what the function reads; others might call it else."""
    variables = {id(one.handle) for one in _variables(graph)}
    subjects = interceptor.subjects()
    if not variables or not subjects or not isinstance(subjects[-1], kinds_of_layers()):
        return ()
    own = {id(handle) for handle in handles_of(subjects[-1])}
    return subjects if variables <= own else ()


def _variables(graph: Any) -> list[Any]:
    """The variables of a traced graph that are alive."""
    held = (one() for one in getattr(graph, "_weak_variables", ()))
    return [one for one in held if one is not None]


def _definition(name: str) -> Any:
    current = context.context()
    return current.get_function_def(name) if current.has_function(name) else None
