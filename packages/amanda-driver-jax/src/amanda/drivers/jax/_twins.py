"""Functions of JAX that run twice outside of jit: as JAX runs them, and op by op for tools at backward ops.

A backward pass goes through the ops, with the tools' taps, first. If a routine changes a gradient there, the
gradients of the ops count. Otherwise they are dropped, and the gradients of JAX's function are added in JAX's
order. So a tool that only observes changes no bit.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from amanda.backend import State
from jax._src.interpreters import ad, batching
from jax._src.util import weakref_cache_key_types
from jax.extend.core import Primitive
from jax.interpreters import mlir

from ._primitives import ORIGINALS, with_mapped_axis_first
from ._traces import INSERTION, TAP, collecting_notes

gate_p = Primitive("amanda_gate")
join_p = Primitive("amanda_join")


class _RunningTwins(threading.local):
    """State of a thread; running: calls whose ops run, innermost last."""

    def __init__(self) -> None:
        self.running: list[Twins] = []


_thread = _RunningTwins()


class Twins:
    """One call of a function that runs twice; its gates choose whose gradients count.

    ops_are_changed: True if those of the ops count.  is_inner: True within another such call.
    """

    def __init__(self) -> None:
        self.ops_are_changed = False
        self.is_inner = bool(_thread.running)  # the outer call chooses for all

    def __enter__(self) -> "Twins":
        _thread.running.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _thread.running.pop()

    def gate(self, values: Sequence[Any], at_ops: bool, inputs: Sequence[Any] = ()) -> list[Any]:
        """Return values behind gates, each of which stops the gradient if the other run's gradients count.

        Values that have no derivative are returned as they are.
        at_ops: True for inputs of the ops, False for results of the function.
        inputs: of the function; a result that is an input has the input's gradient, and needs no gate.
        """
        input_tangents = [tangent for tangent in map(_tangent_of, inputs) if tangent is not None]
        gated_values = []
        for value in values:
            if is_differentiable(value) and not any(
                _tangent_of(value) is tangent for tangent in input_tangents
            ):
                value = ORIGINALS.record(gate_p.bind(value, twins=self, at_ops=at_ops), value)
            gated_values.append(value)
        return gated_values

    def join(
        self, results: Sequence[Any], gated_results: Sequence[Any], op_results: Sequence[Any]
    ) -> list[Any]:
        """Return the results of the function, from which a backward pass also reaches those of the ops."""
        # By the id of a result: one that is returned twice is joined once, so its gradients add up there.
        joined: dict[int, Any] = {}
        for result, gated_result, op_result in zip(results, gated_results, op_results, strict=True):
            if id(result) not in joined and gated_result is not result and is_differentiable(op_result):
                joined[id(result)] = join_p.bind(gated_result, op_result, twins=self)
        return [joined.get(id(result), result) for result in results]

    @staticmethod
    def routine_runner() -> Callable[..., Any]:
        """Return a function that calls `run(*args)`, and notes for the outermost call if gradients change."""
        return partial(_run_noting_changes, tuple(_thread.running[:1]))


def _run_noting_changes(calls: Sequence[Twins], run: Callable[..., Any], *args: Any) -> Any:
    """Return `run(*args)`; mark the calls if a routine changed a value in it."""
    with collecting_notes() as notes:
        result = run(*args)
    for twins in calls:
        # A value of a routine in the place of another is noted as an insertion.
        twins.ops_are_changed |= INSERTION in notes
    return result


# JAX's caches have parameters of primitives in their keys, and hold those of such types weakly.
weakref_cache_key_types.add(Twins)


def run_twice(
    inputs: Sequence[Any], run_function: Callable[[], list[Any]],
    run_ops: Callable[[Sequence[Any]], list[Any]], tools_see_backward: bool,
) -> list[Any]:  # fmt: skip
    """Run ops for the tools; return the function's results if no routine changed a value, else the ops'.

    The function does not run if a routine changed a value, unless tools see the backward ops of the inputs.
    The ops' results are also returned if their taps would come after the function's gradients. Otherwise
    they are recorded as the originals of the function's, and joined with these if they are tapped.
    run_function: runs JAX's function on the inputs.  run_ops: runs its ops on inputs, tapped for the tools.
    """
    twins = Twins()
    # A backward pass has to come to the ops first, so these have to run last.
    function_is_first = tools_see_backward and not twins.is_inner and any(map(is_differentiable, inputs))
    results = run_function() if function_is_first else []
    gated_results = twins.gate(results, at_ops=False, inputs=inputs)
    with collecting_notes() as notes, twins:
        op_results = run_ops(twins.gate(inputs, at_ops=True) if function_is_first else inputs)
        if not function_is_first and not any(map(is_differentiable, op_results)):
            notes.pop(TAP, None)  # no backward pass will come to the ops
    # A changed value makes JAX's results wrong; late taps would be reached after JAX's gradients.
    if INSERTION in notes or (TAP in notes and not function_is_first):
        twins.ops_are_changed = True
        return op_results
    results = results if function_is_first else run_function()
    ORIGINALS.record_all(results, op_results)
    return twins.join(results, gated_results, op_results) if TAP in notes else results


def wants_backward() -> bool:
    """Return True if a tool that is in force here has routines at backward ops."""
    stack = State.current().stack
    return stack is not None and stack.wants_backward


def _tangent_of(value: Any) -> Any:
    """Return the tangent of a symbol, also under vmap; None if no derivative is taken."""
    while isinstance(value, batching.BatchTracer):
        value = value.val
    return value.tangent if isinstance(value, (ad.LinearizeTracer, ad.JVPTracer)) else None


def is_differentiable(value: Any) -> bool:
    """Return True for a symbol of a type that has derivatives."""
    return isinstance(value, jax.core.Tracer) and jax.numpy.issubdtype(value.dtype, jax.numpy.inexact)


def _gate_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    """Return the gate of a value and of its tangent; a zero tangent stays as it is."""
    (value,), (tangent,) = primals, tangents
    if type(tangent) is not ad.Zero:
        tangent = gate_p.bind(tangent, **params)
    return gate_p.bind(value, **params), tangent


def _gate_transposed(cotangent: Any, value: Any, *, twins: Twins, at_ops: bool) -> Any:
    # Gates at the inputs of the ops are open if a routine changed a gradient; those behind the function if
    # none did.
    return [cotangent if twins.ops_are_changed == at_ops else ad.Zero(value.aval.to_ct_aval())]


def _join_jvp(primals: Any, tangents: Any, *, twins: Twins) -> Any:
    """Return the join of a function's result and its ops' result, and that of their tangents."""
    joined = join_p.bind(*primals, twins=twins)
    # A zero tangent has no backward pass to lead to the ops: the tangent of the function's result serves.
    if any(type(tangent) is ad.Zero for tangent in tangents):
        return joined, tangents[0]
    return joined, join_p.bind(*tangents, twins=twins)


def _join_transposed(cotangent: Any, *_: Any, twins: Twins) -> Any:
    twins.ops_are_changed = False  # each backward pass decides anew
    return [cotangent, cotangent]


def _join_batched(args: Any, dims: Any, *, twins: Twins) -> Any:
    if dims[0] != dims[1]:
        args, dims = with_mapped_axis_first(args, dims), (0, 0)
    return join_p.bind(*args, twins=twins), dims[0]


gate_p.def_impl(lambda value, **params: value)
gate_p.def_abstract_eval(lambda value, **params: value)
ad.primitive_jvps[gate_p] = _gate_jvp
ad.primitive_transposes[gate_p] = partial(ad.linear_transpose2, _gate_transposed)
batching.primitive_batchers[gate_p] = lambda args, dims, **params: (gate_p.bind(*args, **params), dims[0])
mlir.register_lowering(gate_p, lambda ctx, value, **params: [value])
join_p.def_impl(lambda value, op_value, twins: value)
join_p.def_abstract_eval(lambda value, op_value, twins: value)
ad.primitive_jvps[join_p] = _join_jvp
ad.primitive_transposes[join_p] = partial(ad.linear_transpose2, _join_transposed)
batching.primitive_batchers[join_p] = _join_batched
mlir.register_lowering(join_p, lambda ctx, value, op_value, twins: [value])
