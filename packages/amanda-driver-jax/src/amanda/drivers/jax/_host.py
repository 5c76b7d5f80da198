"""Routines in Python at ops of programs: JAX calls them back with the values of each execution."""

# The functions of `_signal`, in C, are ten times as fast as those of `signal`, which make enums.
import _signal  # type: ignore[import-not-found]
import signal
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import wraps
from itertools import count
from typing import Any

import numpy as np

import jax
from amanda import interceptor
from amanda.backend import Action, OpFacts, Patches, State
from amanda.errors import RoutineError
from amanda.plan import run_routine, spread
from jax._src import dispatch
from jax._src.interpreters import pxla
from jax._src.util import weakref_cache_key_types
from jax.extend.core import set_current_trace

from ._contexts import ToolStackPrograms
from ._modules import WeightStack, places_among, stacks_of
from ._primitives import CALLBACKS, FAILURES, call_python, raise_failure, straight_through
from ._stacks import reading_slices
from ._tensors import Arrays, cast_to_fit, without_derivative
from ._traces import base_trace, is_numeric, is_tensor

_MAX_RUNS = 1 << 12
"""Number of executions whose `run` is kept: those before are forgotten."""
_EXECUTION = "amanda: execution"
_NUMBER = jax.ShapeDtypeStruct((), np.uint32)


class HostArrays(Arrays):
    """Arrays of NumPy: the values of routines that programs call back."""

    def straight_through(self, original: Any, value: Any) -> Any:
        """Return `value` in the type of `original`."""
        return cast_to_fit(original, np.asarray(value))


_HOST_ARRAYS = HostArrays()
_EXECUTION_NUMBERS = count(1)
_RUN_DICTS: dict[int, dict[str, Any]] = {}
"""The dict `run` of each execution, by its number."""
_LOCK = threading.Lock()


def begin_execution(*_: Any) -> tuple[Any]:
    """Return the number of a new execution."""
    with _LOCK:
        number = next(_EXECUTION_NUMBERS) % (1 << 32)  # programs carry it as uint32
        _RUN_DICTS[number] = {}
        # Nothing says when an execution ends, so the oldest are dropped.
        if len(_RUN_DICTS) > _MAX_RUNS:
            del _RUN_DICTS[next(iter(_RUN_DICTS))]
    return (np.uint32(number),)


class RoutineToken:
    """Callback of a program that stands for a routine: the stack of tools keeps the routine, not the program.

    numbers: 1 if the routine takes the number of an execution, else 0.  observes: the routine changes no
    value.  slices: how many arrays at the end are numbers of slices of stacks.
    """

    def __init__(self, numbers: int, slices: int, observes: bool, state: State, job: "RoutineJob") -> None:
        self._numbers, self._slices, self._observes = numbers, slices, observes
        programs = ToolStackPrograms.of(state.stack)
        self._programs, self._job = weakref.ref(programs), programs.keep_with(self, job)

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """Run the routine; return the arrays that replace its values, none for an observer."""
        job, programs = self._job(), self._programs()
        number, end = arrays[: self._numbers], len(arrays) - self._slices
        values, slices = arrays[self._numbers : end], arrays[end:]
        # The program may outlive the tools, and runs in scopes without them; after a failure it runs to its
        # end without routines, since XLA cannot be stopped.
        if job is not None and programs is not None and programs.is_open and not FAILURES:
            values = job(*number, arrays=values, slices=slices)
        return number if self._observes else (*number, *values)


weakref_cache_key_types.add(RoutineToken)  # JAX's caches keep no routine


class RoutineJob:
    """One routine of one op, called at each execution with arrays of NumPy.

    leaves, tree: the routine's values, whose tensors become arrays.
    stacks: the stacks of which the op reads slices, with the number of axes of each.
    """

    def __init__(
        self, action: Action, facts: OpFacts, leaves: list[Any], tree: Any, shapes: Hashable,
        stacks: Mapping[WeightStack, int],
    ) -> None:  # fmt: skip
        # Copies without selection and values: the callback gets the selected values, of its own execution.
        self._action, self._facts = copy(action), copy(facts)
        self._action.select = None
        self._facts.drop_values()
        self._static = list(map(_static_value, leaves))
        self._places = [i for i, leaf in enumerate(leaves) if is_numeric(leaf)]
        self._tree, self._shapes, self._stacks = tree, shapes, stacks

    def __call__(
        self, number: Any = None, *, arrays: tuple[Any, ...], slices: Sequence[Any] = ()
    ) -> tuple[Any, ...]:
        """Run the routine; return the arrays that replace its values."""
        leaves: list[Any] = list(self._static)  # a job runs on several threads at once: no shared list
        # Not strict: a routine without numeric values gets empty slices of what its op depends on.
        for place, array in zip(self._places, arrays, strict=False):
            leaves[place] = array.view()
            leaves[place].flags.writeable = False  # XLA's memory: an error instead of a silent write
        values = list(jax.tree_util.tree_unflatten(self._tree, leaves))
        run = {} if number is None else _RUN_DICTS.setdefault(int(number), {})
        try:
            numbers = iter(map(int, slices))
            read = {
                stack: tuple(next(numbers) for _ in range(count)) for stack, count in self._stacks.items()
            }
            slices_read = reading_slices(read) if read else nullcontext()
            with running_routine, interceptor.Suspension(), slices_read:
                results = run_routine(
                    _HOST_ARRAYS, self._action, values, self._facts, run, False, shapes=self._shapes
                )
            changed = jax.tree_util.tree_leaves(results, is_leaf=lambda leaf: leaf is None)
            self._check_static(changed)
        except BaseException as error:  # XLA would wrap it; `execute` raises it as itself
            FAILURES.append(error)
            return arrays
        return tuple(np.asarray(changed[place]) for place in self._places)

    def _check_static(self, changed: Sequence[Any]) -> None:
        """Raise RoutineError if the routine changed a value that the callback could not get."""
        for before, after in zip(self._static, changed, strict=True):
            if isinstance(before, jax.ShapeDtypeStruct) and after is not before:
                raise RoutineError(
                    f"a routine in Python returned another value for one of dtype {before.dtype}, which it "
                    "cannot read in a program: return what the routine got, or mark it @amanda.traceable"
                )


def _static_value(leaf: Any) -> Any:
    """Return a stand-in for a value that a callback cannot get; None for an array of numbers."""
    if is_numeric(leaf):
        return None
    if is_tensor(leaf) or isinstance(leaf, jax.core.Tracer):
        return jax.ShapeDtypeStruct(np.shape(leaf), getattr(leaf, "dtype", jax.dtypes.float0))
    return leaf


def insert_callback(
    action: Action, values: list[Any], facts: OpFacts, run: dict[str, Any], shapes: Hashable
) -> list[Any]:
    """Insert a call of a routine into the program that is traced; return the values after the routine."""
    positions = range(len(values)) if action.select is None else action.select
    picked = [values[i] for i in positions]
    leaves, tree = jax.tree_util.tree_flatten(picked, is_leaf=lambda leaf: leaf is None)
    arrays = [without_derivative(leaf) for leaf in leaves if is_numeric(leaf)]
    execution = [_execution_number(run, values)] if action.takes_run else []
    observes = action.observer or not arrays
    stacks = stacks_of(values, places_among(interceptor.subjects()))
    slices = [number for numbers in stacks.values() for number in numbers]
    counts = {stack: len(numbers) for stack, numbers in stacks.items()}
    job = RoutineJob(action, facts, leaves, tree, shapes, counts)
    token = RoutineToken(len(execution), len(slices), observes, State.current(), job)
    result_like = execution if observes else [*execution, *arrays]
    with set_current_trace(base_trace()):
        inputs = arrays or _empty_dependences(values)
        results = call_python(token, result_like, *execution, *inputs, *slices)
    if execution:
        run[_EXECUTION], *results = results
    if observes:
        return values
    replaced = iter(results)
    changed = [straight_through(leaf, next(replaced)) if is_numeric(leaf) else leaf for leaf in leaves]
    result = list(values)
    for position, value in zip(positions, jax.tree_util.tree_unflatten(tree, changed), strict=True):
        result[position] = value
    return result


def _empty_dependences(values: list[Any]) -> list[Any]:
    """Return empty slices of all tensors of an op.

    A callback depends on them, so that under vmap it is called for each row of any of the tensors.
    """
    tensors = {
        id(value): value for value in spread(values) if is_tensor(value) and value.dtype != jax.dtypes.float0
    }
    return [_empty_slice(value) for value in tensors.values()]


def _empty_slice(value: Any) -> Any:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return jax.lax.slice(jax.numpy.reshape(without_derivative(value), -1), (0,), (0,))


def _execution_number(run: dict[str, Any], values: list[Any]) -> Any:
    """Return the symbol of an execution's number, which each routine passes to the next to order them."""
    if _EXECUTION not in run:
        # Below the traces of derivatives, since a number has none.
        with set_current_trace(base_trace()):
            (run[_EXECUTION],) = call_python(begin_execution, [_NUMBER], *_empty_dependences(values))
    return run[_EXECUTION]


def raise_failures_of_programs(patches: Patches) -> None:
    """Make programs raise the exceptions of routines in them."""
    patches.set(pxla.ExecuteReplicated, "__call__", _raise_after_execution(pxla.ExecuteReplicated.__call__))
    patches.on_restore(_RUN_DICTS.clear)


def _raise_after_execution(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the execution of a program: wait for its callbacks, then raise the first exception of theirs."""

    @wraps(original)
    def execute(self: Any, *args: Any) -> Any:
        """Execute the program; only one with callbacks is waited for."""
        if CALLBACKS not in self.ordered_effects:
            return original(self, *args)
        with collecting_exceptions(FAILURES):
            results = original(self, *args)
            # Execution is asynchronous: callbacks may run until results and tokens are ready.
            for result in results:
                result.block_until_ready()
            dispatch.runtime_tokens.block_until_ready()
        raise_failure()
        return results

    return execute


_NUMBERS = sorted(signal.valid_signals())  # once, since each program that calls Python goes through them


class _RoutineState(threading.local):
    """State of a thread; in_routine: True while a routine runs, whose caller catches exceptions."""

    in_routine = False


_thread = _RoutineState()


class _RoutineContext:
    """Context of a routine, in which exceptions of handlers are raised at once: it may wait for a user."""

    def __enter__(self) -> None:
        _thread.in_routine = True

    def __exit__(self, *_: object) -> None:
        _thread.in_routine = False


running_routine = _RoutineContext()


@contextmanager
def collecting_exceptions(failures: list[BaseException]) -> Iterator[None]:
    """Collect exceptions of signal handlers in a list within the context, unless a routine runs.

    Nothing happens on threads other than the main thread, on which Python runs handlers.
    """
    handlers: dict[int, Callable[..., Any]] = {}
    if threading.current_thread() is threading.main_thread():
        pairs = ((number, _signal.getsignal(number)) for number in _NUMBERS)
        handlers = {number: handler for number, handler in pairs if callable(handler)}
    if not handlers:
        yield
        return
    # A copy: `_restore` takes handlers out of the dict as it puts them back.
    originals, is_open = dict(handlers), True

    def collect(number: int, frame: Any) -> Any:
        """Call the original handler; collect its exception, or raise it in a routine or after the end."""
        try:
            return originals[number](number, frame)
        except BaseException as error:
            # Raised within a callback XLA would turn it into its own error; a routine's caller catches it.
            if _thread.in_routine or not is_open:
                raise
            failures.append(error)

    for number in handlers:
        _signal.signal(number, collect)
    try:
        yield
    finally:
        is_open = False
        _restore(handlers, collect)


def _restore(handlers: dict[int, Callable[..., Any]], collect: Callable[..., Any]) -> None:
    """Restore all handlers, even if a signal raises meanwhile."""
    try:
        while handlers:
            number = next(iter(handlers))
            if _signal.getsignal(number) is collect:  # unless the program has set another meanwhile
                _signal.signal(number, handlers[number])
            del handlers[number]
    finally:
        if handlers:
            _restore(handlers, collect)
