"""The driver of function mode: its boundary is where TensorFlow calls a function eagerly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from amanda import interceptor
from amanda.backend import GraphAnalysis, GraphDriver, State, Uninstrumented
from amanda.graph import Copy
from tensorflow.python.eager import context, record

from .._layers import handles_of, kinds_of_layers
from .._recording import allow_tapes_in_routines
from .._requirements import check
from ..graph import (
    DEFAULT_BUDGET,
    RUNS_IN_XLA_ALONE,
    GraphTensors,
    Rewriting,
    TensorFlowReads,
    body_of,
    callees,
    copy_of,
    draws,
    function_of,
    must_compile,
    rewrite,
    runs_without_xla,
)
from ._boundary import Boundary, Trace
from ._copies import Forward, Runnable
from ._identities import Identities, parts
from ._recording import forget_gradient_function, record_gradients

Called = tuple[Any, Sequence[Any], Trace | None]
"""A function that is called, its arguments, and the record of the call whose gradients it computes."""


class FunctionDriver(GraphDriver[Rewriting, Runnable]):
    """TensorFlow's functions: each is run as a copy with the routines in it.

    observer_bytes: how much memory the values may take that observers are given in one call.
    """

    api = 1
    framework = "tensorflow"
    modes = ("function",)
    tensors = GraphTensors()
    reads = TensorFlowReads
    observer_bytes: ClassVar[int] = DEFAULT_BUDGET

    def __init__(self) -> None:
        super().__init__()
        self._identities = Identities()
        self._boundary = Boundary(self._copy)

    def attach(self) -> None:
        """Stand at the boundary, and note gradients that are made."""
        check("function")
        self._boundary.enter(self.attributes)
        record_gradients(self.attributes)
        allow_tapes_in_routines(self.attributes)

    def detach(self) -> None:
        """Leave TensorFlow as it was."""
        super().detach()
        forget_gradient_function()

    @contextmanager
    def rewriting(self) -> Iterator[None]:
        """Eager mode, without tapes: routines that are traced are no part of what the user computes."""
        with context.eager_mode(), record.stop_recording():
            yield

    def rewrite(self, graph: Called, analysis: GraphAnalysis) -> Rewriting:
        """Rewrite a function and those that it calls."""
        atomic, args, trace = graph
        function = function_of(atomic)
        kind, name = parts(function.name)
        compiled = must_compile(function.definition)
        if compiled and not runs_without_xla(function, args.__getitem__):
            raise Uninstrumented(f"the ops of {name}", RUNS_IN_XLA_ALONE)
        rewriting = Rewriting(analysis=analysis, namespace=self.namespace, budget=self.observer_bytes)
        rewriting.runs_without_xla = compiled
        analysis.closed = _is_closed(analysis.state, trace)
        rewriting.differentiated = kind != "inference"
        rewriting.layers.know(_variables(function.graph))
        forward: Forward | None = None if trace is None else trace.copy.handed_on
        if forward is not None:
            forward.hand_on(rewriting)
            if kind == "forward" and (rewriting.kept or rewriting.taped):
                rewriting.report(f"second gradients of {name}", "they take what routines gave for constants")
        body = body_of(
            function, self._identities.of(function.graph, function.name), rewriting, args.__getitem__,
            within=_calling(function.graph), apart=kind == "forward", backward=trace is not None,
            forward_identity=None if forward is None else forward.identity,
        )  # fmt: skip
        rewritten = rewrite(body, rewriting)
        rewriting.changed = rewritten.changed
        if kind == "forward":
            rewriting.handed_on = Forward(rewriting, body.identity)
        if rewritten.changed:
            rewriting.library.append(copy_of(function.definition, rewritten, body))
            if compiled:
                rewriting.report(f"jit_compile of {name}", "in a scope it runs without XLA")
        analysis.finish(function.graph)
        return rewriting

    def runnable(self, graph: Called, rewriting: Rewriting) -> Runnable:
        """Register the copy with the runtime."""
        made = Runnable(graph[0].name.decode(), rewriting.library)
        for name in draws(callees(rewriting.library, _definition)):
            rewriting.report(f"the state of {name}", "its kernel holds it, and a copy's begins anew")
        return made

    def _copy(
        self, state: State, atomic: Any, args: Sequence[Any], trace: Trace | None
    ) -> Copy[Runnable] | None:
        """The copy of a function for the tools in force; None where it is left as it is."""
        if trace is not None:
            closed = _is_closed(state, trace)
            return self.copy((atomic, args, trace), state, closed, atomic, trace.copy)
        if state.stack is None:
            return None
        if b"__backward_" in atomic.name:
            if any(one.wants_backward for one in state.stack.chain):
                name = parts(atomic.name.decode())[1]
                reason = "its forward pass ran before the scope, or uninstrumented"
                state.report(f"the backward ops of {name}", reason)
            return None
        return self.copy((atomic, args, None), state, False, atomic)


def _is_closed(state: State, trace: Trace | None) -> bool:
    """Return True if the tools of a forward call are applied no more."""
    return trace is not None and not any(state.is_open(tool) for tool in trace.copy.stack.applied)


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
