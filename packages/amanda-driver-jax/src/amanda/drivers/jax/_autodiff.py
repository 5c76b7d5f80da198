"""The backward pass: an op's backward op is what lies between taps on its outputs and on its inputs."""

import threading
from collections.abc import Callable, Sequence
from copy import copy
from functools import wraps
from typing import Any

import jax
from amanda import interceptor
from amanda.backend import BackwardStep, EagerDriver, Operation, State, Trace
from amanda.plan import spread
from jax._src import core
from jax._src.interpreters import ad
from jax._src.util import weakref_cache_key_types

from ._contexts import BACKWARD, Programs, key_of, under
from ._primitives import tap
from ._traces import is_staged, is_tensor, primal
from ._twins import Twins


class _Thread(threading.local):
    """made: the executions under way.  attached: the one whose trace was attached last.

    state: in which the backward pass under way began.  handed: symbols, from one tap of an op to the next.
    steps: ops whose backward ops have begun, with what they were given.
    """

    def __init__(self) -> None:
        self.made: list[Made] = []
        self.attached: Made | None = None
        self.state: State | None = None
        self.handed: dict[Made, list[Any]] = {}
        self.steps: dict[Made, tuple[BackwardStep, Trace, Callable[[list[Any]], Any]]] = {}


_thread = _Thread()


class Made:
    """One execution of an op whose backward op is wanted: a mark of the taps around it."""

    def __init__(self, driver: EagerDriver) -> None:
        self._driver = driver
        self._run = Twins.watching()
        self._counts = {"outputs": 0, "inputs": 0}
        self._with_symbols: Callable[[list[Any]], Any] = lambda symbols: {}
        self._trace: Callable[[], Trace | None] = lambda: None

    def attach(self, trace: Trace) -> None:
        """Take the record of the execution."""
        self._trace = Programs.of(trace.stack).keep(self, trace)
        _thread.attached = self

    def __enter__(self) -> "Made":
        _thread.made.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _thread.made.pop()

    @staticmethod
    def current() -> "Made | None":
        """Return the execution that is under way on this thread, if its backward op is wanted."""
        return _thread.made[-1] if _thread.made else None

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
        return rebuild(tap(flat, self, "outputs")) if all(map(is_tensor, flat)) else outputs

    def carrying(self, outputs: Any) -> Any:
        """Return an op's outputs, through which the symbols in `run` come to a backward pass."""
        trace = self._trace()
        assert trace is not None
        symbols, self._with_symbols = _apart(trace.run)
        if not symbols:
            return outputs
        trace.run = _without_symbols(
            trace.run
        )  # the record stays when the program that they are of has ended
        flat, rebuild = self._driver.flatten(outputs)
        return rebuild(tap(flat, self, "run", [primal(one) for one in symbols]))

    @property
    def handed(self) -> list[Any]:
        """Symbols for the next tap that the backward pass comes to."""
        return _thread.handed.get(self, [])

    @handed.setter
    def handed(self, symbols: list[Any]) -> None:
        _thread.handed[self] = symbols

    def transposed(
        self, side: str, positions: Sequence[int], cotangents: list[Any], handed: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the cotangents that go on, after the routines of the open scopes' tools, and symbols.

        side: "outputs" where they enter the backward op, "inputs" where they leave it.  handed: symbols of
        the program around it, from the tap before; those that are returned are for the next one.
        """
        state, trace = _thread.state, self._trace()
        if state is None or trace is None:
            return cotangents, []
        grads = [None] * self._counts[side]
        for position, cotangent in zip(positions, cotangents, strict=True):
            grads[position] = cotangent
        left: list[Any] = []
        if side == "outputs":
            if is_staged():
                trace = copy(trace)
                trace.run = self._with_symbols(handed) if handed else _without_symbols(trace.run)
            assert trace.facts is not None
            op = Operation(f"{trace.facts.op.__name__}_transpose")
            step = BackwardStep(self._driver, trace, op, 0, state)
            if not step.wanted:
                return cotangents, []
            grads = self._run(step.before, grads)
            left, with_symbols = _apart((grads, trace.run))
            _thread.steps[self] = step, trace, with_symbols
        elif self in _thread.steps:
            step, trace, with_symbols = _thread.steps.pop(self)
            entered, trace.run = with_symbols(handed)
            grads = self._run(step.after, grads, entered)
            if not trace.pending:
                self._driver.finish(trace)
        return [_like(grads[i], one) for i, one in zip(positions, cotangents, strict=True)], left


def _apart(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the symbols in a value, and a function that gives it with others in their place."""
    leaves, tree = jax.tree_util.tree_flatten(value, is_leaf=lambda one: one is None)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, core.Tracer)]
    if not places:
        return [], lambda symbols: value
    kept = [None if i in places else leaf for i, leaf in enumerate(leaves)]

    def with_symbols(symbols: list[Any]) -> Any:
        known = dict(zip(places, symbols, strict=True))
        return jax.tree_util.tree_unflatten(tree, [known.get(i, leaf) for i, leaf in enumerate(kept)])

    return [leaves[i] for i in places], with_symbols


def _without_symbols(run: dict[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in run.items() if not isinstance(one, core.Tracer)}


weakref_cache_key_types.add(Made)  # a tap in a cache of JAX keeps no execution


def carried(run: Callable[..., Any], args: Sequence[Any], params: dict[str, Any]) -> Any:
    """Run an op; return its outputs, which carry to the backward pass what routines left in `run`."""
    before, _thread.attached = _thread.attached, None
    try:
        outputs = run(*args, **params)
        return outputs if _thread.attached is None else _thread.attached.carrying(outputs)
    finally:
        _thread.attached = before


def _like(value: Any, cotangent: Any) -> Any:
    return value if value is cotangent else jax.numpy.asarray(value, cotangent.dtype)


def followed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs backward passes, without its own ops among the user's."""

    @wraps(original)
    def backward_pass3(*args: Any) -> Any:
        activation = interceptor.active()
        if activation is None:
            return original(*args)
        before, _thread.state = _thread.state, activation.state
        key = key_of(activation.state, BACKWARD)
        try:
            with interceptor.Suspension(), under(key):
                return original(*args)
        finally:
            _thread.state = before
            if before is None:
                _thread.steps.clear()
                _thread.handed.clear()
            interceptor.reset_root()

    return backward_pass3


def follow_backward(attributes: Any) -> None:
    """Make every backward pass bring cotangents to the taps that it comes through."""
    attributes.set(ad, "backward_pass3", followed(ad.backward_pass3))
