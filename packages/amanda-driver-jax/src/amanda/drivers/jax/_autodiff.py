"""The backward pass: an op's backward op lies between the taps on its outputs and on its inputs."""

import threading
from collections.abc import Callable, Sequence
from copy import copy
from functools import wraps
from typing import Any

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


class _BackwardState(threading.local):
    """State of a thread.

    executions: the executions under way, innermost last.  attached: the execution whose trace was attached
    last.  state: in which the backward pass under way began.  carried_symbols: from one tap of an op to the
    next.  steps: executions whose backward ops have begun, with their traces.
    """

    def __init__(self) -> None:
        self.executions: list[TappedExecution] = []
        self.attached: TappedExecution | None = None
        self.state: State | None = None
        self.carried_symbols: dict[TappedExecution, list[Any]] = {}
        self.steps: dict[TappedExecution, tuple[BackwardStep, Trace, Callable[[list[Any]], Any]]] = {}


_thread = _BackwardState()


class TappedExecution:
    """One execution of an op that tools instrument in the backward pass, with taps on inputs and outputs."""

    def __init__(self, driver: EagerDriver) -> None:
        self._driver = driver
        self._run = Twins.watching()
        self._counts = {"outputs": 0, "inputs": 0}
        # Until routines leave symbols in `run`, there is nothing to put back.
        self._with_symbols: Callable[[list[Any]], Any] = lambda symbols: {}
        self._trace: Callable[[], Trace | None] = lambda: None

    def attach(self, trace: Trace) -> None:
        """Attach the trace of the execution."""
        # JAX's caches hold this object in the taps; the trace, which holds the tools, is the stack's to hold.
        self._trace = ToolStackPrograms.of(trace.stack).keep_with(self, trace)
        _thread.attached = self

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
        """Put tapped values in the place of an op's inputs."""
        flat = spread(inputs)
        self._counts["inputs"] = len(flat)
        tapped = iter(tap(flat, self, "inputs"))
        for i, value in enumerate(inputs):
            listed = isinstance(value, (list, tuple))
            inputs[i] = [next(tapped) for _ in value] if listed else next(tapped)

    def tap_outputs(self, outputs: Any) -> Any:
        """Return an op's outputs, tapped."""
        flat, rebuild = self._driver.flatten(outputs)
        self._counts["outputs"] = len(flat)
        # References and tokens among the outputs have no cotangents that a tap could carry.
        return rebuild(tap(flat, self, "outputs")) if all(map(is_tensor, flat)) else outputs

    def carry_symbols(self, outputs: Any) -> Any:
        """Return an op's outputs with a tap that carries the symbols in `run` to a backward pass."""
        trace = self._trace()
        assert trace is not None
        symbols, self._with_symbols = _split_symbols(trace.run)
        if not symbols:
            return outputs
        trace.run = _without_symbols(
            trace.run
        )  # the record stays when the program that they are of has ended
        flat, rebuild = self._driver.flatten(outputs)
        return rebuild(tap(flat, self, "run", [primal(symbol) for symbol in symbols]))

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

        side: "outputs" where cotangents enter the backward op, "inputs" where they leave it.
        carried_symbols: of the program around the tap, from the tap before.
        """
        state, trace = _thread.state, self._trace()
        if state is None or trace is None:
            return cotangents, []
        # A tap has only the values that have tangents: the others of the op get no gradient.
        grads = [None] * self._counts[side]
        for position, cotangent in zip(positions, cotangents, strict=True):
            grads[position] = cotangent
        symbols: list[Any] = []
        if side == "outputs":
            grads, symbols = self._enter_backward_op(state, trace, grads, carried_symbols)
        elif self in _thread.steps:
            grads = self._leave_backward_op(grads, carried_symbols)
        cast = [_in_dtype_of(grads[i], before) for i, before in zip(positions, cotangents, strict=True)]
        return cast, symbols

    def _enter_backward_op(
        self, state: State, trace: Trace, grads: list[Any], carried_symbols: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Run the routines before the backward op; return the gradients, and symbols in these and `run`."""
        if is_staged():
            # The pass itself is traced: its `run` holds symbols that end with that program.
            trace = copy(trace)
            trace.run = (
                self._with_symbols(carried_symbols) if carried_symbols else _without_symbols(trace.run)
            )
        assert trace.facts is not None
        op = Operation(f"{trace.facts.op.__name__}_transpose")
        step = BackwardStep(self._driver, trace, op, 0, state)
        if not step.has_work:
            return grads, []
        grads = self._run(step.run_before, grads)
        symbols, with_symbols = _split_symbols((grads, trace.run))
        # The pass reaches the tap of the inputs later, after JAX's transpose of the op.
        _thread.steps[self] = step, trace, with_symbols
        return grads, symbols

    def _leave_backward_op(self, grads: list[Any], carried_symbols: list[Any]) -> list[Any]:
        """Run the routines after the backward op; return the gradients of the op's inputs."""
        step, trace, with_symbols = _thread.steps.pop(self)
        incoming_grads, trace.run = with_symbols(carried_symbols)
        grads = self._run(step.run_after, grads, incoming_grads)
        self._driver.mark_backward_analysed(trace)
        return grads


def _split_symbols(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the symbols in a value, and a function that returns the value with other symbols in place."""
    leaves, tree = jax.tree_util.tree_flatten(value, is_leaf=lambda leaf: leaf is None)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)]
    if not places:
        return [], lambda symbols: value
    constants = [None if i in places else leaf for i, leaf in enumerate(leaves)]

    def with_symbols(symbols: list[Any]) -> Any:
        symbols_by_place = dict(zip(places, symbols, strict=True))
        return jax.tree_util.tree_unflatten(
            tree, [symbols_by_place.get(i, leaf) for i, leaf in enumerate(constants)]
        )

    return [leaves[i] for i in places], with_symbols


def _without_symbols(run: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if not isinstance(value, jax.core.Tracer)}


weakref_cache_key_types.add(TappedExecution)  # so a tap in a cache of JAX keeps no execution alive


def run_carrying(run: Callable[..., Any], args: Sequence[Any], params: dict[str, Any]) -> Any:
    """Run an op; return its outputs, which carry the symbols in `run` to the backward pass."""
    before, _thread.attached = _thread.attached, None
    try:
        outputs = run(*args, **params)
        return outputs if _thread.attached is None else _thread.attached.carry_symbols(outputs)
    finally:
        _thread.attached = before


def _in_dtype_of(value: Any, cotangent: Any) -> Any:
    return value if value is cotangent else jax.numpy.asarray(value, cotangent.dtype)


def _instrument_backward_pass(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap JAX's backward pass, whose own ops are not the user's: only taps in it run routines."""

    @wraps(original)
    def backward_pass3(*args: Any) -> Any:
        activation = interceptor.active()
        if activation is None:
            return original(*args)
        before, _thread.state = _thread.state, activation.state
        key = cache_key_of(activation.state, BACKWARD)
        try:
            with interceptor.Suspension(), with_cache_key(key):
                return original(*args)
        finally:
            _thread.state = before
            if before is None:  # the outermost pass: an exception may have left steps behind
                _thread.steps.clear()
                _thread.carried_symbols.clear()
            interceptor.reset_root()

    return backward_pass3


def instrument_backward(attributes: Any) -> None:
    """Make every backward pass run routines at the taps that it comes through."""
    attributes.set(ad, "backward_pass3", _instrument_backward_pass(ad.backward_pass3))
