"""Routines in Python at ops of programs: JAX calls them back with the values of each execution."""

import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from functools import wraps
from itertools import count
from typing import Any

import numpy as np

import jax
from amanda import interceptor
from amanda.backend import Action, Attributes, OpFacts, State
from amanda.errors import RoutineError
from amanda.plan import run_routine, spread
from jax._src import core, dispatch, dtypes
from jax._src.interpreters import pxla
from jax._src.util import weakref_cache_key_types

from ._contexts import Programs
from ._modules import Stack, places_among, stacks_of
from ._primitives import CALLBACKS, FAILURES, call, raise_failure, straight
from ._signals import collecting, interrupting
from ._stacks import reading
from ._tensors import Arrays, fitting, without_derivative
from ._traces import base, is_numeric, is_tensor

_RUNS = 1 << 12
"""Number of executions whose `run` is kept: those before are forgotten."""
_EXECUTION = "amanda: execution"
_NUMBER = jax.ShapeDtypeStruct((), np.uint32)


class HostArrays(Arrays):
    """Arrays of NumPy, which routines in Python are given at ops of programs."""

    def straight_through(self, original: Any, value: Any) -> Any:
        """`value` in the type of `original`."""
        return fitting(original, np.asarray(value))


_HOST = HostArrays()
_LAST = count(1)
_ALL: dict[int, dict[str, Any]] = {}
"""The dict `run` of each execution, by number."""
_LOCK = threading.Lock()


def begin(*_: Any) -> tuple[Any]:
    """Return the number of a new execution."""
    with _LOCK:
        number = next(_LAST) % (1 << 32)
        _ALL[number] = {}
        if len(_ALL) > _RUNS:
            del _ALL[next(iter(_ALL))]
    return (np.uint32(number),)


class Token:
    """Stands in a program for a routine, which is the tools' to keep: no program holds a tool.

    numbers: 1 if the routine is given the number of an execution, else 0.  observes: it changes nothing.
    slices: how many arrays at the end are numbers of slices of stacks.
    """

    def __init__(self, numbers: int, slices: int, observes: bool, state: State, job: "Job") -> None:
        self._numbers, self._slices, self._observes = numbers, slices, observes
        programs = Programs.of(state.stack)
        self._programs, self._job = weakref.ref(programs), programs.keep(self, job)

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """Run the routine; return what takes the place of what it was given, or nothing for an observer."""
        job, programs = self._job(), self._programs()
        number, end = arrays[: self._numbers], len(arrays) - self._slices
        given, slices = arrays[self._numbers : end], arrays[end:]
        if job is not None and programs is not None and programs.is_open and not FAILURES:
            given = job(*number, given=given, slices=slices)
        return number if self._observes else (*number, *given)


weakref_cache_key_types.add(Token)  # JAX's caches keep no routine


class Job:
    """One routine of one op, called at each execution with arrays of NumPy.

    leaves, tree: what the routine is given, in which each tensor is to be an array.
    stacks: what the op reads slices of, and along how many axes.
    """

    def __init__(
        self, action: Action, facts: OpFacts, leaves: list[Any], tree: Any, shapes: Hashable,
        stacks: Mapping[Stack, int],
    ) -> None:  # fmt: skip
        self._action, self._facts = copy(action), copy(facts)
        self._action.select = None
        self._facts.drop_values()
        self._static = list(map(_static, leaves))
        self._places = [i for i, leaf in enumerate(leaves) if is_numeric(leaf)]
        self._tree, self._shapes, self._stacks = tree, shapes, stacks

    def __call__(
        self, number: Any = None, *, given: tuple[Any, ...], slices: Sequence[Any] = ()
    ) -> tuple[Any, ...]:
        """Run the routine; return the arrays that take the place of those that it was given."""
        leaves: list[Any] = list(self._static)
        for place, array in zip(self._places, given, strict=False):  # or one that an op depends on is given
            leaves[place] = array.view()
            leaves[place].flags.writeable = False
        values = list(jax.tree_util.tree_unflatten(self._tree, leaves))
        run = {} if number is None else _ALL.setdefault(int(number), {})
        try:
            numbers = iter(map(int, slices))
            read = {one: tuple(next(numbers) for _ in range(count)) for one, count in self._stacks.items()}
            slices_read = reading(read) if read else nullcontext()
            with interrupting, interceptor.Suspension(), slices_read:
                results = run_routine(
                    _HOST, self._action, values, self._facts, run, False, shapes=self._shapes
                )
            changed = jax.tree_util.tree_leaves(results, is_leaf=lambda one: one is None)
            self._check_static(changed)
        except BaseException as error:
            FAILURES.append(error)
            return given
        return tuple(np.asarray(changed[place]) for place in self._places)

    def _check_static(self, changed: Sequence[Any]) -> None:
        for before, after in zip(self._static, changed, strict=True):
            if isinstance(before, jax.ShapeDtypeStruct) and after is not before:
                raise RoutineError(
                    f"a routine in Python returned another value for one of dtype {before.dtype}, which it "
                    "cannot read in a program: return what the routine got, or mark it @amanda.traceable"
                )


def _static(leaf: Any) -> Any:
    """Return what stands for a value that no callback can be given; None for an array of numbers."""
    if is_numeric(leaf):
        return None
    if is_tensor(leaf) or isinstance(leaf, core.Tracer):
        return jax.ShapeDtypeStruct(np.shape(leaf), getattr(leaf, "dtype", jax.dtypes.float0))
    return leaf


def run_later(
    action: Action, values: list[Any], facts: OpFacts, run: dict[str, Any], shapes: Hashable
) -> list[Any]:
    """Put a routine into the program that is traced; return the values with what the routine will give."""
    positions = range(len(values)) if action.select is None else action.select
    picked = [values[i] for i in positions]
    leaves, tree = jax.tree_util.tree_flatten(picked, is_leaf=lambda one: one is None)
    arrays = [without_derivative(leaf) for leaf in leaves if is_numeric(leaf)]
    number = [_number(run, values)] if action.takes_run else []
    observes = action.observer or not arrays
    stacks = stacks_of(values, places_among(interceptor.subjects()))
    slices = [one for numbers in stacks.values() for one in numbers]
    counts = {one: len(numbers) for one, numbers in stacks.items()}
    job = Job(action, facts, leaves, tree, shapes, counts)
    token = Token(len(number), len(slices), observes, State.current(), job)
    gives = number if observes else [*number, *arrays]
    with core.set_current_trace(base()):
        results = call(token, gives, *number, *(arrays or _dependence(values)), *slices)
    if number:
        run[_EXECUTION], *results = results
    if observes:
        return values
    given = iter(results)
    changed = [straight(leaf, next(given)) if is_numeric(leaf) else leaf for leaf in leaves]
    result = list(values)
    for position, value in zip(positions, jax.tree_util.tree_unflatten(tree, changed), strict=True):
        result[position] = value
    return result


def _dependence(values: list[Any]) -> list[Any]:
    """Return arrays without elements of all that an op is given: rows of any of it call back each."""
    given = {id(one): one for one in spread(values) if is_tensor(one) and one.dtype != dtypes.float0}
    return [_emptied(one) for one in given.values()]


def _emptied(value: Any) -> Any:
    if dtypes.issubdtype(value.dtype, dtypes.prng_key):
        value = jax.random.key_data(value)
    return jax.lax.slice(jax.numpy.reshape(without_derivative(value), -1), (0,), (0,))


def _number(run: dict[str, Any], values: list[Any]) -> Any:
    """Return the symbol of the number of an execution, which goes from one of its routines to the next."""
    if _EXECUTION not in run:
        with core.set_current_trace(base()):
            (run[_EXECUTION],) = call(begin, [_NUMBER], *_dependence(values))
    return run[_EXECUTION]


def raise_failures(attributes: Attributes) -> None:
    """Make programs raise what routines in them have raised."""
    attributes.set(pxla.ExecuteReplicated, "__call__", _raising(pxla.ExecuteReplicated.__call__))
    attributes.on_restore(_ALL.clear)


def _raising(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def execute(self: Any, *args: Any) -> Any:
        if CALLBACKS not in self.ordered_effects:
            return original(self, *args)
        with collecting(FAILURES):
            results = original(self, *args)
            for one in results:
                one.block_until_ready()
            dispatch.runtime_tokens.block_until_ready()
        raise_failure()
        return results

    return execute
