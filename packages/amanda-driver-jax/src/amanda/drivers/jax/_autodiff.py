"""The backward pass: routines see the gradients of an op at taps on its outputs and its inputs."""

import threading
from collections.abc import Callable, Sequence
from copy import copy
from functools import wraps
from typing import Any, NamedTuple

import jax
from amanda import interceptor
from amanda.backend import BackwardStep, EagerDriver, Operation, State, Trace
from amanda.plan import spread
from jax._src.interpreters import ad
from jax._src.util import weakref_cache_key_types

from ._contexts import BACKWARD, ToolStackPrograms, cache_key_of, with_cache_key
from ._primitives import tap
from ._traces import is_staged, is_tensor, primal
from ._twins import Twins


class _BegunBackwardOp(NamedTuple):
    """A backward op between its taps.  restore: puts symbols into the incoming gradients and `run`."""

    step: BackwardStep
    trace: Trace
    restore: Callable[[list[Any]], Any]


class _BackwardState(threading.local):
    """State of a thread.

    executions: the executions under way, innermost last.  last_attached: the execution whose trace was
    attached last.  state: in which the backward pass under way began, else None.
    carried_symbols: from one tap of an op to the next.  begun_ops: the backward ops under way.
    """

    def __init__(self) -> None:
        self.executions: list[TappedExecution] = []
        self.last_attached: TappedExecution | None = None
        self.state: State | None = None
        self.carried_symbols: dict[TappedExecution, list[Any]] = {}
        self.begun_ops: dict[TappedExecution, _BegunBackwardOp] = {}


_thread = _BackwardState()


class TappedExecution:
    """One execution of an op whose inputs and outputs are tapped, so that tools see its backward op.

    The backward pass comes to the tap of the outputs, JAX's transpose of the op, and the tap of the inputs.
    """

    def __init__(self, driver: EagerDriver) -> None:
        self._driver = driver
        self._call_routines = Twins.routine_runner()
        self._value_counts = {"outputs": 0, "inputs": 0}
        # Returns the dict `run` with symbols in it; without symbols of routines there is nothing to put back.
        self._restore_run: Callable[[list[Any]], Any] = lambda symbols: {}
        self._trace: Callable[[], Trace | None] = lambda: None  # a weak reference, once a trace is attached

    def attach(self, trace: Trace) -> None:
        """Attach the trace of the execution, weakly; this is then the execution that was attached last."""
        # JAX's caches hold this object in the taps; the trace, which holds the tools, is the stack's to hold.
        self._trace = ToolStackPrograms.of(trace.stack).keep_with(self, trace)
        _thread.last_attached = self

    def __enter__(self) -> "TappedExecution":
        _thread.executions.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _thread.executions.pop()

    @staticmethod
    def current() -> "TappedExecution | None":
        """Return the innermost tapped execution that is under way on this thread; None if there is none."""
        return _thread.executions[-1] if _thread.executions else None

    def tap_inputs(self, inputs: list[Any]) -> None:
        """Put tapped values in the place of an op's inputs, also of those in a list; note their number."""
        values = spread(inputs)
        self._value_counts["inputs"] = len(values)
        tapped_values = iter(tap(values, self, "inputs"))
        for i, value in enumerate(inputs):
            is_list = isinstance(value, (list, tuple))
            inputs[i] = [next(tapped_values) for _ in value] if is_list else next(tapped_values)

    def tap_outputs(self, outputs: Any) -> Any:
        """Return an op's outputs, tapped if all of them are arrays; note their number."""
        values, rebuild = self._driver.flatten(outputs)
        self._value_counts["outputs"] = len(values)
        # References and tokens among the outputs have no cotangents that a tap could carry.
        return rebuild(tap(values, self, "outputs")) if all(map(is_tensor, values)) else outputs

    def carry_symbols_of_run(self, outputs: Any) -> Any:
        """Return an op's outputs, tapped to carry the symbols in its `run`, if any, to the backward pass.

        The symbols are taken out of the trace's `run`.
        """
        trace = self._trace()
        assert trace is not None
        symbols, self._restore_run = _take_out_symbols(trace.run)
        if not symbols:
            return outputs
        # The trace loses them, since it lives longer than the program that they are of.
        trace.run = _without_symbols(trace.run)
        values, rebuild = self._driver.flatten(outputs)
        return rebuild(tap(values, self, "run", [primal(symbol) for symbol in symbols]))

    @property
    def carried_symbols(self) -> list[Any]:
        """Return the symbols that the last tap of the backward pass left for the next one."""
        return _thread.carried_symbols.get(self, [])

    @carried_symbols.setter
    def carried_symbols(self, symbols: list[Any]) -> None:
        _thread.carried_symbols[self] = symbols

    def observe_cotangents(
        self, side: str, positions: Sequence[int], cotangents: list[Any], carried_symbols: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Run the routines at a tap; return the cotangents after them, and symbols for the next tap.

        Cotangents pass as they are outside of a scope, and once the tools of the execution have gone; values
        of routines are cast to the cotangents' types.
        side: "outputs" where cotangents enter the backward op, "inputs" where they leave it.
        carried_symbols: from the tap before.
        """
        state, trace = _thread.state, self._trace()
        if state is None or trace is None:
            return cotangents, []
        # A tap has only the values that have tangents: the others of the op get no gradient.
        grads = [None] * self._value_counts[side]
        for position, cotangent in zip(positions, cotangents, strict=True):
            grads[position] = cotangent
        symbols: list[Any] = []
        if side == "outputs":
            grads, symbols = self._begin_backward_op(state, trace, grads, carried_symbols)
        elif self in _thread.begun_ops:
            grads = self._end_backward_op(grads, carried_symbols)
        cast = [_in_dtype_of(grads[i], before) for i, before in zip(positions, cotangents, strict=True)]
        return cast, symbols

    def _begin_backward_op(
        self, state: State, trace: Trace, grads: list[Any], carried_symbols: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Run the routines before the backward op; return the gradients, and symbols in them and in `run`.

        The op is then among those begun, unless it has neither routines nor an analysis to come.
        """
        if is_staged():
            # The pass itself is traced: a trace of its own has the symbols, which end with that program.
            trace = copy(trace)
            trace.run = self._restore_run(carried_symbols) if carried_symbols else _without_symbols(trace.run)
        assert trace.facts is not None
        op = Operation(f"{trace.facts.op.__name__}_transpose")
        step = BackwardStep(self._driver, trace, op, place=0, state=state)
        if not step.has_work:
            return grads, []
        grads = self._call_routines(step.run_before, grads)
        symbols, restore = _take_out_symbols((grads, trace.run))
        # The pass reaches the tap of the inputs later, after JAX's transpose of the op.
        _thread.begun_ops[self] = _BegunBackwardOp(step, trace, restore)
        return grads, symbols

    def _end_backward_op(self, grads: list[Any], carried_symbols: list[Any]) -> list[Any]:
        """Run the routines after a begun backward op; return the gradients of the op's inputs.

        The op's backward is then marked as analysed.
        """
        step, trace, restore = _thread.begun_ops.pop(self)
        incoming_grads, trace.run = restore(carried_symbols)
        grads = self._call_routines(step.run_after, grads, incoming_grads)
        self._driver.mark_backward_analysed(trace)
        return grads


def _take_out_symbols(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the symbols in a pytree, and a function of new symbols that returns the pytree with these."""
    leaves, tree = jax.tree_util.tree_flatten(value, is_leaf=lambda leaf: leaf is None)
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)]
    if not positions:
        return [], lambda symbols: value
    # The function must not keep the symbols themselves alive.
    other_leaves = [None if i in positions else leaf for i, leaf in enumerate(leaves)]

    def restore(symbols: list[Any]) -> Any:
        """Return the pytree with other symbols at the places of the former ones."""
        restored_leaves = list(other_leaves)
        for position, symbol in zip(positions, symbols, strict=True):
            restored_leaves[position] = symbol
        return jax.tree_util.tree_unflatten(tree, restored_leaves)

    return [leaves[i] for i in positions], restore


def _without_symbols(run: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if not isinstance(value, jax.core.Tracer)}


weakref_cache_key_types.add(TappedExecution)  # so a tap in a cache of JAX keeps no execution alive


def run_and_carry_symbols(run_op: Callable[..., Any], args: Sequence[Any], params: dict[str, Any]) -> Any:
    """Run an op; return its outputs, tapped if routines left symbols in `run` for the backward pass."""
    outer_execution, _thread.last_attached = _thread.last_attached, None
    try:
        outputs = run_op(*args, **params)
        execution = _thread.last_attached  # set by `attach` as the op ran
        return outputs if execution is None else execution.carry_symbols_of_run(outputs)
    finally:
        _thread.last_attached = outer_execution


def _in_dtype_of(value: Any, cotangent: Any) -> Any:
    return value if value is cotangent else jax.numpy.asarray(value, cotangent.dtype)


def _instrument_backward_pass(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return JAX's `backward_pass3` where no op is the user's: only the taps that it reaches run routines."""

    @wraps(original)
    def backward_pass3(*args: Any) -> Any:
        """Stand-in for JAX's `backward_pass3`: runs the routines at taps, in a scope; other ops are JAX's."""
        activation = interceptor.active()
        if activation is None:
            return original(*args)
        outer_state, _thread.state = _thread.state, activation.state
        # What JAX traces in the pass has a cache key of its own, since no op of it is analysed.
        key = cache_key_of(activation.state, BACKWARD)
        try:
            with interceptor.Suspension(), with_cache_key(key):
                return original(*args)
        finally:
            _thread.state = outer_state
            if outer_state is None:  # the outermost pass: an exception may have left entries behind
                _thread.begun_ops.clear()
                _thread.carried_symbols.clear()
            interceptor.reset_root()  # the program's places are numbered anew after each pass

    return backward_pass3


def _pass_by_loops_without_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return JAX's look-up of transposes, with one for while loops that no gradient comes to.

    JAX has none for these loops, and drops a loop before the pass if nothing reads its derivative.  A loop
    whose ops have routines in Python has an effect, so that JAX keeps it.
    """

    @wraps(original)
    def get_primitive_transpose(primitive: Any) -> Callable[..., Any]:
        transpose: Callable[..., Any] = original(primitive)

        def transpose_if_reached(cotangents: Any, *args: Any, **params: Any) -> Any:
            if all(type(cotangent) is ad.Zero for cotangent in cotangents):
                return [
                    ad.Zero(arg.aval.to_ct_aval()) if ad.is_undefined_primal(arg) else None for arg in args
                ]
            return transpose(cotangents, *args, **params)

        return transpose_if_reached if primitive is jax.lax.while_p else transpose

    return get_primitive_transpose


def instrument_backward(patches: Any) -> None:
    """Make every backward pass run routines at the taps that it comes through."""
    patches.set(ad, "backward_pass3", _instrument_backward_pass(ad.backward_pass3))
    by_loops = _pass_by_loops_without_gradient(ad.get_primitive_transpose)
    patches.set(ad, "get_primitive_transpose", by_loops)
