"""Routines in Python at ops of programs: JAX calls them back with the values of each execution."""

import threading
from collections.abc import Callable, Hashable
from copy import copy
from functools import partial, wraps
from typing import Any

import numpy as np

import jax
from amanda import interceptor
from amanda.backend import Action, Attributes, OpFacts, State
from amanda.plan import run_routine, spread
from jax._src import callback, core, dispatch, effects
from jax._src.interpreters import pxla

from ._called import call
from ._contexts import Programs
from ._taps import straight, tie
from ._tensors import Arrays, fitting, without_derivative
from ._traces import base, is_tensor

_RUNS = 1 << 12
"""Number of executions whose `run` is kept: those before are forgotten."""
_EXECUTION = "amanda: execution"
_NUMBER = jax.ShapeDtypeStruct((), np.uint32)
_TOKEN = jax.ShapeDtypeStruct((0,), np.bool_)


class HostArrays(Arrays):
    """Arrays of NumPy, which routines in Python are given at ops of programs."""

    def straight_through(self, original: Any, value: Any) -> Any:
        """`value` in the type of `original`."""
        return fitting(original, np.asarray(value))


_HOST = HostArrays()


class Failures:
    """Exceptions of routines that programs have called, until they are raised in the user's call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[BaseException] = []

    def keep(self, error: BaseException) -> None:
        """Keep an exception; the first one counts."""
        with self._lock:
            self._kept.append(error)

    def pending(self) -> bool:
        """Return True if an exception is there to be raised: no routine runs before it is."""
        return bool(self._kept)

    def take(self) -> BaseException | None:
        """Return the first exception, and forget all."""
        with self._lock:
            first = self._kept[0] if self._kept else None
            self._kept.clear()
        return first


FAILURES = Failures()


class Runs:
    """The dict `run` of each execution, by number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._all: dict[int, dict[str, Any]] = {}

    def begin(self, *_: Any) -> tuple[Any]:
        """Return the number of a new execution."""
        with self._lock:
            self._last += 1
            self._all[self._last % (1 << 32)] = {}
            if len(self._all) > _RUNS:
                del self._all[next(iter(self._all))]
            return (np.uint32(self._last),)

    def of(self, number: Any) -> dict[str, Any]:
        """Return the dict of an execution."""
        return self._all.setdefault(int(number), {})

    def clear(self) -> None:
        """Forget every execution."""
        self._all.clear()


RUNS = Runs()


class Token:
    """Stands in a program for a routine, which is the tools' to keep: no program holds a tool.

    numbers: 1 if the routine is given the number of an execution, else 0.
    """

    def __init__(self, numbers: int, state: State, job: "Job") -> None:
        self._numbers = numbers
        self._job = Programs.of(state.layer).keep(self, job)

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """Run the routine; return what takes the place of what it was given."""
        job = self._job()
        return arrays if job is None else job(*arrays)

    def observe(self, *arrays: Any) -> tuple[Any, ...]:
        """Run a routine that changes nothing."""
        return *self(*arrays)[: self._numbers], np.zeros((0,), np.bool_)


class Job:
    """One routine of one op, called at each execution with arrays of NumPy.

    static: what the routine is given beside arrays.  tree: the form of it all.
    """

    def __init__(
        self, action: Action, facts: OpFacts, state: State, leaves: list[Any], tree: Any, shapes: Hashable
    ) -> None:
        self._action = copy(action)
        self._action.select = None
        self._facts = OpFacts(
            facts.op, facts.op_id, facts.namespace, facts.names, scope=facts.scope, source=facts.source,
            op_type=facts.op_type, backward_op=facts.backward_op, backward_op_id=facts.backward_op_id,
        )  # fmt: skip
        self._state = state
        self._static = [None if is_tensor(leaf) else leaf for leaf in leaves]
        self._places = [i for i, leaf in enumerate(leaves) if is_tensor(leaf)]
        self._tree = tree
        self._shapes = shapes

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """Run the routine; return the arrays that take the place of those that it was given."""
        numbers, own = (arrays[:1], arrays[1:]) if self._action.takes_run else ((), arrays)
        return *(np.asarray(one) for one in numbers), *self._given(numbers, own)

    def _given(self, numbers: tuple[Any, ...], own: tuple[Any, ...]) -> tuple[Any, ...]:
        given = tuple(np.asarray(one) for one in own[: len(self._places)])
        if FAILURES.pending() or any(scope.closed for scope in self._state.scopes):
            return given
        leaves: list[Any] = list(self._static)
        for place, array in zip(self._places, given, strict=True):
            leaves[place] = array.view()
            leaves[place].flags.writeable = False
        values = list(jax.tree_util.tree_unflatten(self._tree, leaves))
        run = RUNS.of(numbers[0]) if numbers else {}
        try:
            with interceptor.Suspension():
                results = run_routine(
                    _HOST, self._action, values, self._facts, run, False, shapes=self._shapes
                )
        except BaseException as error:
            FAILURES.keep(error)
            return given
        changed = jax.tree_util.tree_leaves(results, is_leaf=lambda one: one is None)
        return tuple(np.asarray(changed[place]) for place in self._places)


def run_later(
    action: Action, values: list[Any], facts: OpFacts, run: dict[str, Any], shapes: Hashable
) -> list[Any]:
    """Put a routine into the program that is traced; return the values with what the routine will give."""
    positions = range(len(values)) if action.select is None else action.select
    picked = [values[i] for i in positions]
    leaves, tree = jax.tree_util.tree_flatten(picked, is_leaf=lambda one: one is None)
    state = State.current()
    job = Token(int(action.takes_run), state, Job(action, facts, state, leaves, tree, shapes))
    arrays = [without_derivative(leaf) for leaf in leaves if is_tensor(leaf)]
    number = [_number(run, values)] if action.takes_run else []
    told = [_NUMBER] if action.takes_run else []
    avals = tuple(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in arrays)
    if action.observer or not arrays:
        with core.set_current_trace(base()):
            *number, token = call(job.observe, (*told, _TOKEN), *number, *(arrays or _dependence(values)))
        run.update(zip((_EXECUTION,), number, strict=False))
        return _tied(values, token)
    with core.set_current_trace(base()):
        results = call(job, (*told, *avals), *number, *arrays)
    run.update(zip((_EXECUTION,), results[: len(told)], strict=False))
    given = iter(results[len(told) :])
    changed = [straight(leaf, next(given)) if is_tensor(leaf) else leaf for leaf in leaves]
    result = list(values)
    for position, value in zip(positions, jax.tree_util.tree_unflatten(tree, changed), strict=True):
        result[position] = value
    return result


def _tied(values: list[Any], token: Any) -> list[Any]:
    """Return the values, the first array of which waits for a callback: JAX drops what nothing waits for."""
    for i, value in enumerate(values):
        if is_tensor(value):
            return [*values[:i], tie(value, token), *values[i + 1 :]]
        if isinstance(value, list) and any(map(is_tensor, value)):
            return [*values[:i], _tied(value, token), *values[i + 1 :]]
    return values


def _dependence(values: list[Any]) -> list[Any]:
    """Return an array without elements of what an op is given, for which each round of a loop calls back."""
    first = next((one for one in spread(values) if is_tensor(one)), None)
    if first is None:
        return []
    row = jax.numpy.reshape(without_derivative(first), -1)
    return [jax.lax.slice(row, (0,), (0,))]


def _number(run: dict[str, Any], values: list[Any]) -> Any:
    """Return the symbol of the number of an execution, which goes from one of its routines to the next."""
    if _EXECUTION not in run:
        with core.set_current_trace(base()):
            (run[_EXECUTION],) = call(RUNS.begin, (_NUMBER,), *_dependence(values))
    return run[_EXECUTION]


def raise_failures(attributes: Attributes) -> None:
    """Make programs raise what routines in them have raised, and let derivatives have routines."""
    attributes.set(pxla.ExecuteReplicated, "__call__", _raising(pxla.ExecuteReplicated.__call__))
    for allowed in (effects.remat_allowed_effects, effects.custom_derivatives_allowed_effects):
        if callback.IOEffect not in allowed._effect_types:
            allowed.add_type(callback.IOEffect)
            attributes.on_restore(partial(allowed._effect_types.discard, callback.IOEffect))
    attributes.on_restore(RUNS.clear)


def _raising(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def execute(self: Any, *args: Any) -> Any:
        results = original(self, *args)
        if self.has_unordered_effects or self.has_host_callbacks:
            for one in results:
                one.block_until_ready()
            dispatch.runtime_tokens.block_until_ready()
            error = FAILURES.take()
            if error is not None:
                raise error
        return results

    return execute
