"""The driver of function mode, and the ids of functions, which are the same in every process."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

from amanda import interceptor
from amanda.backend import CannotInstrument, GraphAnalysis, GraphDriver, SelfTestProgram, State, digest
from amanda.graph import RewrittenCopy
from tensorflow.python.eager import context, record

from .._layers import handles_of, layer_classes
from .._requirements import NEWEST_TESTED, PRIVATE_NAMES, function_self_test
from .._tensors import allow_tapes_in_routines
from ..graph import (
    DEFAULT_BUDGET,
    RUNS_IN_XLA_ALONE,
    GraphTensorOps,
    TensorFlowReads,
    TensorFlowRewriting,
    forget_gradient_function,
    function_body,
    function_of,
    must_compile,
    numbered_copy,
    ops_with_generators,
    record_gradients,
    rewrite,
    runs_without_xla,
    with_callees,
)
from ._boundary import ForwardFacts, ForwardRecord, FunctionBoundary, RegisteredCopy


class FunctionCall(NamedTuple):
    """A function, its arguments, and the record of the forward call whose gradients it computes, or None."""

    atomic: Any
    args: Sequence[Any]
    forward_record: ForwardRecord | None


class FunctionDriver(GraphDriver[TensorFlowRewriting, RegisteredCopy]):
    """Instruments TensorFlow's functions: runs a copy of each function, with the routines in it.

    observer_bytes: memory limit for the values that observers get in one call.
    """

    api = 2
    framework = "tensorflow"
    modes = ("function",)
    newest_tested = NEWEST_TESTED
    private_names = PRIVATE_NAMES["function"]
    tensors = GraphTensorOps()
    reads_type = TensorFlowReads
    observer_bytes: ClassVar[int] = DEFAULT_BUDGET

    def __init__(self) -> None:
        super().__init__()
        self._identities = Identities()
        self._boundary = FunctionBoundary(self._find_copy)

    def attach(self) -> None:
        """Patch the calls of functions, the creation of gradients, and the tapes of routines."""
        self._boundary.patch(self.patches)
        record_gradients(self.patches)
        allow_tapes_in_routines(self.patches)

    def detach(self) -> None:
        """Leave TensorFlow as it was."""
        super().detach()
        forget_gradient_function()

    def self_test_program(self) -> SelfTestProgram | None:
        """Return a program of a function with one op, and its gradient; None where eager mode is off."""
        return function_self_test()

    @contextmanager
    def rewriting_context(self) -> Iterator[None]:
        """Return a context of eager mode without tapes, so that traced routines enter no graph or tape."""
        with context.eager_mode(), record.stop_recording():
            yield

    def rewrite(self, graph: FunctionCall, analysis: GraphAnalysis) -> TensorFlowRewriting:
        """Rewrite a function and those that it calls; its copy, if changed, comes last in the library.

        A function with jit_compile is run for a trial; raises CannotInstrument if XLA alone can run it.
        """
        atomic, args, forward_record = graph
        function = function_of(atomic)
        kind, user_name = split_runtime_name(function.name)
        # TensorFlow calls a function with gradients as a forward function, and later its backward function.
        is_forward = kind == "forward"
        is_compiled = must_compile(function.definition)
        if is_compiled and not runs_without_xla(function, args.__getitem__):
            raise CannotInstrument(f"the ops of {user_name}", RUNS_IN_XLA_ALONE)
        rewriting = TensorFlowRewriting(
            analysis=analysis, namespace=self.namespace, budget=self.observer_bytes
        )
        rewriting.runs_without_xla = is_compiled
        # A backward function may run after the scope; then it is rewritten for the saved values alone,
        # without plans for its ops.
        analysis.scopes_closed = _is_closed(analysis.state, forward_record)
        rewriting.is_differentiated = kind != "inference"
        rewriting.layer_index.add_layers_named_in(_live_variables(function.graph))
        forward_facts: ForwardFacts | None = None
        if forward_record is not None:
            forward_facts = forward_record.copy.gradient_data
        if forward_facts is not None:
            forward_facts.copy_into(rewriting)
            # A backward function that is called as a forward function gets gradients itself.
            if is_forward and (rewriting.saved_tensor_by_read or rewriting.autodiff_places):
                subject = f"second gradients of {user_name}"
                rewriting.report(subject, "they take what routines gave for constants")
        body = function_body(
            function, self._identities.identity_of(function.graph, function.name), rewriting,
            args.__getitem__, enclosing_layers=_calling_layers(function.graph),
            has_gradients_elsewhere=is_forward, is_backward=forward_record is not None,
            forward_identity=None if forward_facts is None else forward_facts.identity,
        )  # fmt: skip
        rewritten = rewrite(body, rewriting)
        rewriting.has_insertions = rewritten.is_changed
        if is_forward:
            rewriting.gradient_data = ForwardFacts(rewriting, body.identity)
        if rewritten.is_changed:
            rewriting.library.append(numbered_copy(function.definition, rewritten, body))
            if is_compiled:
                rewriting.report(f"jit_compile of {user_name}", "in a scope it runs without XLA")
        analysis.release_symbols(function.graph)
        return rewriting

    def build_runnable(self, graph: FunctionCall, rewriting: TensorFlowRewriting) -> RegisteredCopy:
        """Register the copy with the runtime; report random ops in it, whose generators start anew."""
        registered_copy = RegisteredCopy(graph.atomic.name.decode(), rewriting.library)
        for name in ops_with_generators(with_callees(rewriting.library, _find_definition)):
            rewriting.report_restarted(name)
        return registered_copy

    def _find_copy(
        self, state: State, atomic: Any, args: Sequence[Any], forward_record: ForwardRecord | None
    ) -> RewrittenCopy[RegisteredCopy] | None:
        """Return the copy of a function for the applied tools; None where it runs uninstrumented.

        A backward function without the record of its forward call does; its backward ops are reported.
        """
        call = FunctionCall(atomic, args, forward_record)
        if forward_record is not None:
            is_closed = _is_closed(state, forward_record)
            return self.find_or_build_copy(call, state, is_closed, atomic, forward_record.copy)
        if state.stack is None:
            return None
        # Without a record, the forward call ran before the scope, so the ids of its ops are unknown.
        if b"__backward_" in atomic.name:
            if any(stack.wants_backward for stack in state.stack.chain):
                _, user_name = split_runtime_name(atomic.name.decode())
                reason = "its forward pass ran before the scope, or uninstrumented"
                state.report(f"the backward ops of {user_name}", reason)
            return None
        return self.find_or_build_copy(call, state, False, atomic)


def _is_closed(state: State, forward_record: ForwardRecord | None) -> bool:
    """Return True if no tool of a forward call is applied any more; False without a forward call."""
    return forward_record is not None and not any(
        state.is_open(tool) for tool in forward_record.copy.stack.applied
    )


def _calling_layers(graph: Any) -> Sequence[Any]:
    """Return the layers that call a function, if the innermost one holds all variables of the function.

    Otherwise, and for a function without variables, other layers may call it, too: returns ().
    """
    handle_ids = {id(variable.handle) for variable in _live_variables(graph)}
    calling_layers = interceptor.subjects()
    if not handle_ids or not calling_layers or not isinstance(calling_layers[-1], layer_classes()):
        return ()
    layer_handle_ids = {id(handle) for handle in handles_of(calling_layers[-1])}
    return calling_layers if handle_ids <= layer_handle_ids else ()


def _live_variables(graph: Any) -> list[Any]:
    """Return the living variables of a traced graph."""
    variables = (variable() for variable in getattr(graph, "_weak_variables", ()))
    return [variable for variable in variables if variable is not None]


def _find_definition(name: str) -> Any:
    """Return the FunctionDef of a function of the runtime; None for an unknown name."""
    runtime = context.context()
    return runtime.get_function_def(name) if runtime.has_function(name) else None


_RUNTIME_NAME = re.compile(r"^__(inference|forward|backward)_(.*?)(?:_\d+)*$")


class Identities:
    """Identities of the graphs of functions: digests of the user's name and a count of its graphs."""

    def __init__(self) -> None:
        self._identity_by_graph: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._graph_counts: dict[str, int] = {}

    def identity_of(self, graph: Any, name: str) -> int:
        """Return the identity of a graph, from the runtime name of its function; 64 bits."""
        identity = self._identity_by_graph.get(graph)
        if identity is None:
            kind, user_name = split_runtime_name(name)
            # A forward function has the ops of the inference function, and the same ids.
            key = f"backward {user_name}" if kind == "backward" else user_name
            # Each retracing makes another graph of this name; a count tells them apart, alike in every
            # process.
            self._graph_counts[key] = self._graph_counts.get(key, 0) + 1
            identity = self._identity_by_graph[graph] = digest("function", key, self._graph_counts[key])
        return identity


def split_runtime_name(name: str) -> tuple[str, str]:
    """Split a runtime name into "inference", "forward" or "backward" and the user's name."""
    kind, base = "inference", name
    # Prefixes nest, as in "__inference___backward_f_12_34"; the innermost one counts.
    while kind == "inference" and (match := _RUNTIME_NAME.match(base)):
        kind, base = match.group(1), match.group(2)
    return kind, base
