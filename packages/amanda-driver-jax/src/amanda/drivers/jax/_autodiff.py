"""The backward pass: an op's backward op is what lies between taps on its outputs and on its inputs."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import wraps
from typing import Any

import jax
from amanda import interceptor
from amanda.backend import BackwardStep, EagerDriver, State, Trace
from amanda.plan import spread
from jax._src import core
from jax._src.interpreters import ad

from ._contexts import BACKWARD, Programs, key_of, under
from ._operation import backward_operation
from ._taps import tap
from ._traces import is_staged, is_tensor, primal


class _Thread(threading.local):
    """made: the executions under way.  attached: the one whose trace was attached last.

    state: in which the backward pass under way began.  steps: its ops.  brought: what the forward pass left.
    """

    def __init__(self) -> None:
        self.made: list[Made] = []
        self.attached: Made | None = None
        self.state: State | None = None
        self.brought: dict[Made, list[Any]] = {}
        self.steps: dict[Made, tuple[BackwardStep, list[Any], Trace]] = {}


_thread = _Thread()


class Made:
    """One execution of an op whose backward op is wanted: a mark of the taps around it."""

    def __init__(self, driver: EagerDriver) -> None:
        self._driver = driver
        self._counts = {"outputs": 0, "inputs": 0}
        self._carried: tuple[list[Any], list[int], Any] = [], [], None
        self._trace: Callable[[], Trace | None] = lambda: None

    def attach(self, trace: Trace) -> None:
        """Take the record of the execution."""
        self._trace = Programs.of(trace.layer).keep(self, trace)
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
        listed = isinstance(outputs, (list, tuple))
        flat = list(outputs) if listed else [outputs]
        self._counts["outputs"] = len(flat)
        tapped = tap(flat, self, "outputs") if all(map(is_tensor, flat)) else flat
        return tapped if listed else tapped[0]

    def carrying(self, outputs: Any) -> Any:
        """Return an op's outputs, through which the symbols in `run` come to a backward pass."""
        trace = self._trace()
        assert trace is not None
        leaves, tree = jax.tree_util.tree_flatten(trace.run)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, core.Tracer)]
        if not places:
            return outputs
        symbols = [primal(leaves[i]) for i in places]
        self._carried = [None if i in places else leaf for i, leaf in enumerate(leaves)], places, tree
        listed = isinstance(outputs, (list, tuple))
        tapped = tap(outputs if listed else [outputs], self, "run", symbols)
        return tapped if listed else tapped[0]

    def bring(self, carried: list[Any]) -> None:
        """Take the symbols that `run` had in the forward pass."""
        _thread.brought[self] = carried

    def brought(self) -> list[Any]:
        """Return these symbols."""
        return _thread.brought.get(self, [])

    def _run(self, carried: Sequence[Any]) -> dict[str, Any]:
        if not carried:
            trace = self._trace()
            assert trace is not None
            return {name: one for name, one in trace.run.items() if not isinstance(one, core.Tracer)}
        leaves, places, tree = self._carried
        known = dict(zip(places, carried, strict=True))
        run = [known.get(i, leaf) for i, leaf in enumerate(leaves)]
        return dict(jax.tree_util.tree_unflatten(tree, run))

    def transposed(
        self, side: str, positions: Sequence[int], cotangents: list[Any], carried: Sequence[Any]
    ) -> list[Any]:
        """Return the cotangents that go on, after the routines of the open scopes' tools."""
        state, trace = _thread.state, self._trace()
        if state is None or trace is None:
            return cotangents
        grads = [None] * self._counts[side]
        for position, cotangent in zip(positions, cotangents, strict=True):
            grads[position] = cotangent
        if side == "outputs":
            if is_staged():
                trace = copy(trace)
                trace.run = self._run(carried)
            assert trace.facts is not None
            op = backward_operation(trace.facts.op.__name__)
            step = BackwardStep(self._driver, trace, op, 0, state)
            if not step.wanted:
                return cotangents
            grads = step.before(grads)
            _thread.steps[self] = step, grads, trace
        elif self in _thread.steps:
            step, entered, trace = _thread.steps.pop(self)
            if carried:
                trace.run = self._run(carried)
            grads = step.after(grads, entered)
            if not trace.pending:
                self._driver.finish(trace)
        return [_like(grads[i], one) for i, one in zip(positions, cotangents, strict=True)]


@contextmanager
def execution() -> Iterator[Callable[[Any], Any]]:
    """Context of an op, which gives what makes its outputs carry to the backward pass what routines left."""
    before, _thread.attached = _thread.attached, None
    try:
        yield lambda outputs: outputs if _thread.attached is None else _thread.attached.carrying(outputs)
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
                _thread.brought.clear()
            interceptor.reset_root()

    return backward_pass3


def follow_backward(attributes: Any) -> None:
    """Make every backward pass bring cotangents to the taps that it comes through."""
    attributes.set(ad, "backward_pass3", followed(ad.backward_pass3))
